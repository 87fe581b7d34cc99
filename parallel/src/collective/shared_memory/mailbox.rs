//! How descriptors come from each rank to every other: memory can be shared by name or by descriptor, and these have no
//! names.
//!
//! Whoever forms a group makes a pair of sockets for each rank. One end is the rank's inbox, the other goes to all
//! others. A message is one exchange of one rank: its number, and descriptors beside it. Nobody waits at a mailbox,
//! whose room is for all ranks: all send, all meet, and then all must be there. Each life of a group has its own, so
//! nothing of an earlier one is in it.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
        sockopt::socket_type,
    },
};

use super::SharedMemoryError;
use crate::{collective::EXCHANGED_DESCRIPTORS_MAX, ids::Rank};

/// Most ranks of a group with mailboxes: a socket has room for a message of each, and a message of the parent to a rank
/// for a descriptor of each.
pub const MAILBOX_RANKS_MAX: usize = 16;

/// Bytes of a message: the rank, and how many descriptors come with it.
const MESSAGE_BYTES: usize = 4;

/// A message as it came: its bytes, which may be anything, and what came beside them.
type Message = (Vec<u8>, Vec<OwnedFd>);

/// The mailbox of one rank, for whoever made it.
pub(super) struct Pair {
    inbox: OwnedFd,
    /// For the others.
    slot: OwnedFd,
}

/// One for each of `ranks`.
pub(super) fn pairs(ranks: usize) -> Result<Vec<Pair>, SharedMemoryError> {
    if ranks > MAILBOX_RANKS_MAX {
        return Err(SharedMemoryError::MailboxRanks { ranks });
    }
    let pair = |_| {
        let made = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        made.map(|(inbox, slot)| Pair { inbox, slot })
    };
    let pairs: Result<_, Errno> = (0..ranks).map(pair).collect();
    pairs.map_err(|error| SharedMemoryError::Mailboxes { source: error.into() })
}

/// What the process of `rank` needs of them: its inbox, then the others' slots in rank order.
pub(super) fn descriptors(pairs: &[Pair], rank: Rank) -> Vec<BorrowedFd<'_>> {
    let Some(own) = pairs.get(rank.index()) else { return Vec::new() };
    let others = pairs.iter().enumerate().filter(|(at, _)| *at != rank.index());
    let slots = others.map(|(_, pair)| pair.slot.as_fd());
    std::iter::once(own.inbox.as_fd()).chain(slots).collect()
}

/// The mailbox of one rank, for the rank.
pub(super) struct Mailbox {
    rank: Rank,
    inbox: OwnedFd,
    /// Of all ranks, without this one's own.
    slots: Vec<Option<OwnedFd>>,
}

impl Mailbox {
    /// Takes what [`descriptors`] lists for `rank` of so many.
    pub(super) fn new(
        rank: Rank,
        ranks: usize,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Mailbox, SharedMemoryError> {
        let refuse = |problem: String| SharedMemoryError::NotAMailbox { problem };
        if descriptors.len() != ranks {
            return Err(refuse(format!("{} descriptors for {ranks} ranks", descriptors.len())));
        }
        for descriptor in &descriptors {
            match socket_type(descriptor) {
                Ok(SocketType::SEQPACKET) => {}
                Ok(_) => return Err(refuse("a socket of another kind".to_owned())),
                Err(error) => return Err(refuse(format!("a descriptor that is no socket ({error})"))),
            }
        }
        let mut descriptors = descriptors.into_iter();
        let inbox = descriptors.next().ok_or_else(|| refuse("no descriptor".to_owned()))?;
        let slots = (0..ranks).map(|at| if at == rank.index() { None } else { descriptors.next() });
        Ok(Mailbox { rank, inbox, slots: slots.collect() })
    }

    /// Sends `mine` to everybody, or tells whom it could not reach.
    pub(super) fn send(&self, mine: &[BorrowedFd<'_>]) -> Result<(), String> {
        if mine.len() > EXCHANGED_DESCRIPTORS_MAX {
            return Err(format!("{} are more than {EXCHANGED_DESCRIPTORS_MAX}", mine.len()));
        }
        let [low, high] = self.rank.0.to_le_bytes();
        let message: [u8; MESSAGE_BYTES] = [low, high, mine.len() as u8, !(mine.len() as u8)];
        let others = self.slots.iter().enumerate();
        for (to, slot) in others.filter_map(|(to, slot)| slot.as_ref().map(|slot| (to, slot))) {
            put(slot, &message, mine).map_err(|error| match error {
                Errno::AGAIN => format!("the mailbox of rank {to} is full"),
                error => format!("the mailbox of rank {to} takes none: {}", io::Error::from(error)),
            })?;
        }
        Ok(())
    }

    /// What everybody has sent, in rank order, this rank's own place empty; or what is missing or wrong. All must have
    /// been sent before. Where something is wrong, nothing stays in the mailbox.
    pub(super) fn take(&self) -> Result<Vec<Vec<OwnedFd>>, String> {
        let mut taken: Vec<Option<Vec<OwnedFd>>> = self.slots.iter().map(|_| None).collect();
        let outcome = (1..taken.len()).try_for_each(|_| {
            let Some((message, descriptors)) = self.next()? else {
                let from =
                    self.slots.iter().zip(&taken).position(|(slot, got)| slot.is_some() && got.is_none());
                return Err(format!("nothing has come from rank {}", from.unwrap_or_default()));
            };
            let (from, expected) = sender(&message).ok_or("a message of another kind has come")?;
            if expected != descriptors.len() {
                let got = descriptors.len();
                return Err(format!(
                    "{got} of {expected} descriptors have come from rank {from}; the limit of open files \
                     (ulimit -n) may be too low"
                ));
            }
            match taken.get_mut(from) {
                Some(place) if from != self.rank.index() && place.is_none() => *place = Some(descriptors),
                _ => return Err(format!("a message of rank {from} has come that should not")),
            }
            Ok(())
        });
        if outcome.is_err() {
            self.empty();
        }
        outcome.map(|()| taken.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// Closes what has come and nobody takes.
    pub(super) fn empty(&self) {
        // No more than there is room for.
        let mut left = 2 * MAILBOX_RANKS_MAX;
        while left > 0 && matches!(self.next(), Ok(Some(_))) {
            left -= 1;
        }
    }

    /// The next message, if there is one.
    fn next(&self) -> Result<Option<Message>, String> {
        // One byte more than a message has, so that a longer one is known for what it is.
        let mut bytes = [0; MESSAGE_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(EXCHANGED_DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = loop {
            match recvmsg(&self.inbox, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(format!("the mailbox gives none: {}", io::Error::from(error))),
                Ok(got) => break got,
            }
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        // Nobody sends an empty message: the other end is closed.
        Ok((got.bytes > 0).then(|| (bytes[..got.bytes.min(bytes.len())].to_vec(), descriptors)))
    }
}

/// Whose message it is, and with how many descriptors it was sent.
fn sender(message: &[u8]) -> Option<(usize, usize)> {
    let &[low, high, count, check] = message else { return None };
    (count == !check).then(|| (usize::from(u16::from_le_bytes([low, high])), usize::from(count)))
}

fn put(slot: &OwnedFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(EXCHANGED_DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        match sendmsg(slot, &[IoSlice::new(message)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            outcome => return outcome.map(drop),
        }
    }
}

#[cfg(test)]
mod tests;
