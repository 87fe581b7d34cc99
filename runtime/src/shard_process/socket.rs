//! The two directions of a framed Unix socket. Descriptors travel beside the frames that need them.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use consort_parallel::collective::MAILBOX_RANKS_MAX;
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};
use tokio_util::codec::LengthDelimitedCodec;
use wincode::{SchemaRead, SchemaWrite};

use super::frame::{FrameError, Wire, codec, decode, encode};

/// Bytes taken from the socket at a time: a usual step fits many times over.
const READ_BYTES: usize = 64 << 10;

/// Descriptors of one message at most: a group's segment of memory, and a rank's mailbox.
pub(super) const DESCRIPTORS_MAX: usize = 1 + MAILBOX_RANKS_MAX;

/// Descriptors that may wait for their frames: those of a message, and of one that comes before it is looked at.
const DESCRIPTORS_WAITING_MAX: usize = 2 * DESCRIPTORS_MAX;

/// Whether an operation may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Never,
    Forever,
}

/// What came of a look at the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    Bytes,
    Nothing,
    /// The other side is gone.
    End,
}

/// Takes frames from a socket.
pub(super) struct FrameReader {
    socket: Arc<OwnedFd>,
    codec: LengthDelimitedCodec,
    buffer: BytesMut,
    scratch: Box<[u8]>,
    descriptors: VecDeque<OwnedFd>,
}

impl FrameReader {
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        let scratch = vec![0; READ_BYTES].into_boxed_slice();
        Self { socket, codec: codec(), buffer: BytesMut::new(), scratch, descriptors: VecDeque::new() }
    }

    /// Takes what the socket has, a bounded part of it.
    pub(super) fn fill(&mut self, wait: Wait) -> Result<Received, FrameError> {
        let mut flags = RecvFlags::CMSG_CLOEXEC;
        flags.set(RecvFlags::DONTWAIT, wait == Wait::Never);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let taken = loop {
            let mut into = [IoSliceMut::new(&mut self.scratch)];
            match recvmsg(self.socket.as_fd(), &mut into, &mut ancillary, flags) {
                Err(Errno::INTR) => {}
                taken => break taken,
            }
        };
        let bytes = match taken {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
            Err(error) => return Err(FrameError::Framing(error.into())),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        if self.descriptors.len() > DESCRIPTORS_WAITING_MAX {
            return Err(FrameError::Descriptors);
        }
        self.buffer.extend_from_slice(&self.scratch[..bytes]);
        Ok(if bytes == 0 { Received::End } else { Received::Bytes })
    }

    /// The next message, where all of it was taken.
    pub(super) fn message<M>(&mut self) -> Result<Option<M>, FrameError>
    where
        M: for<'de> SchemaRead<'de, Wire, Dst = M>,
    {
        decode(&mut self.codec, &mut self.buffer)
    }

    /// The descriptors that came with the last message, which says how many; `None` where not all have come.
    pub(super) fn descriptors(&mut self, count: u8) -> Option<Vec<OwnedFd>> {
        let count = usize::from(count);
        (count <= self.descriptors.len()).then(|| self.descriptors.drain(..count).collect())
    }
}

/// A frame on its way, or the rest of one.
struct Outgoing {
    bytes: Bytes,
    /// Up to [`DESCRIPTORS_MAX`].
    descriptors: Vec<OwnedFd>,
}

/// Puts frames into a socket.
pub(super) struct FrameWriter {
    socket: Arc<OwnedFd>,
    codec: LengthDelimitedCodec,
    queue: VecDeque<Outgoing>,
}

impl FrameWriter {
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket, codec: codec(), queue: VecDeque::new() }
    }

    /// Puts a message behind those that wait. Whoever calls bounds their number by what the protocol allows under way.
    pub(super) fn push<M>(&mut self, message: &M, descriptors: Vec<OwnedFd>) -> Result<(), FrameError>
    where
        M: SchemaWrite<Wire, Src = M>,
    {
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(FrameError::Descriptors);
        }
        let bytes = encode(&mut self.codec, message)?;
        self.queue.push_back(Outgoing { bytes, descriptors });
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends what waits, or as much as goes without waiting. False if the other side is gone.
    pub(super) fn flush(&mut self, wait: Wait) -> Result<bool, FrameError> {
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::DONTWAIT, wait == Wait::Never);
        while let Some(first) = self.queue.front_mut() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let borrowed: Vec<_> = first.descriptors.iter().map(AsFd::as_fd).collect();
            if !borrowed.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
            }
            match sendmsg(self.socket.as_fd(), &[IoSlice::new(&first.bytes)], &mut ancillary, flags) {
                Ok(sent) => {
                    // They went with the first of the bytes.
                    first.descriptors.clear();
                    first.bytes.advance(sent);
                    if first.bytes.is_empty() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(FrameError::Framing(error.into())),
            }
        }
        Ok(true)
    }
}

/// Waits until one of `descriptors` has what is asked of it, or the time is over. The flags of each.
pub(super) fn poll<const N: usize>(
    descriptors: [(&OwnedFd, PollFlags); N],
    limit: Duration,
) -> rustix::io::Result<[PollFlags; N]> {
    let mut polled = descriptors.map(|(descriptor, flags)| PollFd::new(descriptor, flags));
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    match rustix::event::poll(&mut polled, Some(&limit)) {
        // Whoever calls looks again.
        Ok(_) | Err(Errno::INTR) => Ok(polled.map(|polled| polled.revents())),
        Err(error) => Err(error),
    }
}
