//! Ranks that are processes of one host, or threads that know nothing of each other: their places are in one segment
//! of memory that all map.
//!
//! Whoever forms a group makes a segment for each life of it ([`SharedMemoryGroup::create`]) and holds a [`Seat`] for
//! each rank; the process that computes the rank is given the seat's descriptor and becomes the member
//! ([`SharedMemory::attach`]). Sums, their order and their bits are those of [`Local`](super::Local).
//!
//! Nothing in the segment is ever locked, so a process may end anywhere without leaving the others more than a
//! meeting that it does not come to. They wait there until somebody aborts the group: the seats' owner, who notices
//! the end of the process. A process that was stopped and goes on after the abort finds the segment of the life that
//! it was stopped in: it can disturb nobody, because those that go on have a new one.
//!
//! | file | what it is |
//! |---|---|
//! | `layout.rs` | what lies where in a segment |
//! | `segment.rs` | a segment as it is mapped, and the typed ways into it |
//! | `meeting.rs` | the meeting point: counters and a word to sleep on |
//! | `life.rs` | what one process holds of one segment: aborts, and who is told of them |
//! | `mailbox.rs` | how descriptors come from each rank to every other, where a group is made for it |
//! | `member.rs`, `seat.rs` | the two sides of a rank |

// These reach memory that other processes write.
#[allow(unsafe_code)]
mod life;
#[allow(unsafe_code)]
mod member;
#[allow(unsafe_code)]
mod segment;

mod layout;
mod mailbox;
mod meeting;
mod seat;
#[cfg(test)]
mod tests;

use std::io;

pub use layout::RANKS_MAX;
pub use mailbox::MAILBOX_RANKS_MAX;
pub use member::SharedMemory;
pub use seat::{Seat, SharedMemoryGroup};

use crate::ids::Rank;

/// Why there is no group in shared memory, or no place in it.
#[derive(Debug, thiserror::Error)]
pub enum SharedMemoryError {
    /// No group has so many ranks.
    #[error("a group in shared memory has 1 to {RANKS_MAX} ranks, not {ranks}")]
    Ranks {
        /// How many were asked for.
        ranks: usize,
    },
    /// No group with mailboxes has so many.
    #[error(
        "{ranks} ranks cannot send descriptors to each other: a group in which they do has {MAILBOX_RANKS_MAX} at most"
    )]
    MailboxRanks {
        /// How many were asked for.
        ranks: usize,
    },
    /// The system has no sockets for them.
    #[error("cannot make the mailboxes of a group's ranks{hint}", hint = hint(source))]
    Mailboxes {
        /// What the system says.
        source: io::Error,
    },
    /// Descriptors that are not a rank's mailbox.
    #[error("these descriptors are not the mailbox of a rank: {problem}")]
    NotAMailbox {
        /// What is wrong with them.
        problem: String,
    },
    /// The system refuses something.
    #[error("cannot {action} the shared memory of a group{hint}", hint = hint(source))]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// A descriptor that is not a group's.
    #[error("this descriptor is not the shared memory of a group of this build: {problem}")]
    NotASegment {
        /// What is wrong with it.
        problem: String,
    },
    /// The group is smaller.
    #[error("{rank} cannot join a group of {ranks} ranks")]
    NoSuchRank {
        /// Who wanted to join.
        rank: Rank,
        /// Ranks in the group.
        ranks: usize,
    },
    /// Two members under one rank would write over each other.
    #[error("{rank} has joined this group before: each life of a group takes one member of each rank")]
    Taken {
        /// Who wanted to join.
        rank: Rank,
    },
}

/// What to do about it, where that is known.
fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => ": free some memory, or run fewer ranks",
        _ if source.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
            ": raise the limit of open files (ulimit -n)"
        }
        _ => "",
    }
}
