//! A segment as it is mapped into this process, and the typed ways into it.
//!
//! Words are atomic and may be read and written by anybody at any time. Everything else is written by one process and
//! read by others, and never both at once: by the rules of [`Board`](super::super::board::Board). What stands in a
//! segment is believed only after it was checked, so that a damaged one costs an error.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    slice,
    sync::atomic::{AtomicU32, AtomicU64, Ordering::*},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};

use super::{
    SharedMemoryError,
    layout::{self, HEADER_BYTES, LINE_BYTES, Layout, MAGIC, RANKS_MAX, REASON_BYTES_MAX, VERSION},
};
use crate::collective::{
    EXCHANGE_BYTES_MAX,
    board::{Operation, PIECE_MAX, Part},
};

/// As it stands in `/proc/PID/maps`.
pub(super) const NAME: &str = "consort-collective";

/// Without these a peer could take the memory away under a reader's feet.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapped segment.
pub(super) struct Segment {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is an address of memory that stays mapped as long as the value lives, and belongs to no thread.
unsafe impl Send for Segment {}
// SAFETY: likewise; what is not atomic is reached through unsafe functions only, whose callers see to its turns.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes one for `ranks`, and takes its memory from the system at once: later a lack of it would be a fault.
    pub(super) fn create(ranks: usize) -> Result<(OwnedFd, Self), SharedMemoryError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(SharedMemoryError::Ranks { ranks });
        }
        let layout = Layout::of(ranks);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(NAME, flags).map_err(system("create"))?;
        rustix::fs::ftruncate(&fd, layout.bytes as u64).map_err(system("size"))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, layout.bytes as u64)
            .map_err(system("allocate"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(system("seal"))?;
        let segment = Self::map(fd.as_fd(), layout)?;
        for (at, value) in segment.identity() {
            segment.long(at).store(value, Relaxed);
        }
        Ok((fd, segment))
    }

    /// Maps one that another process made.
    pub(super) fn attach(fd: BorrowedFd<'_>) -> Result<Self, SharedMemoryError> {
        let refuse = |problem: String| Err(SharedMemoryError::NotASegment { problem });
        match rustix::fs::fcntl_get_seals(fd) {
            Ok(seals) if seals.contains(SEALS) => {}
            Ok(_) => return refuse("its size is not sealed".to_owned()),
            Err(error) => return refuse(format!("it is not a memory file ({error})")),
        }
        let bytes = rustix::fs::fstat(fd).map_err(system("look at"))?.st_size;
        // From here on the size stays.
        let bytes = usize::try_from(bytes).unwrap_or(0);
        if !(HEADER_BYTES..=Layout::of(RANKS_MAX).bytes).contains(&bytes) {
            return refuse(format!("it has {bytes} bytes"));
        }
        // Only the header is used before the rest is known to be there.
        let mut header = Layout::of(1);
        header.bytes = bytes;
        let mut segment = Self::map(fd, header)?;
        let ranks = segment.long(layout::RANKS_AT).load(Relaxed);
        let ranks = usize::try_from(ranks).ok().filter(|ranks| (1..=RANKS_MAX).contains(ranks));
        let Some(ranks) = ranks else { return refuse("its number of ranks is out of range".to_owned()) };
        let expected = Layout::of(ranks);
        if expected.bytes != bytes {
            return refuse(format!("it has {bytes} bytes, and {ranks} ranks need {}", expected.bytes));
        }
        segment.layout = expected;
        for (at, value) in segment.identity() {
            let found = segment.long(at).load(Relaxed);
            if found != value {
                return refuse(format!("byte {at} begins {found:#x} where {value:#x} should stand"));
            }
        }
        Ok(segment)
    }

    /// What the header says, and where.
    fn identity(&self) -> [(usize, u64); 5] {
        [
            (layout::MAGIC_AT, MAGIC),
            (layout::VERSION_AT, VERSION),
            (layout::RANKS_AT, self.layout.ranks as u64),
            (layout::PIECE_MAX_AT, PIECE_MAX as u64),
            (layout::BYTES_AT, self.layout.bytes as u64),
        ]
    }

    fn map(fd: BorrowedFd<'_>, layout: Layout) -> Result<Self, SharedMemoryError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses the place, so no memory of this process is touched. Views of the mapping are
        // given out by the functions below, each of which says why it may.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), layout.bytes, protection, MapFlags::SHARED, fd, 0)
        };
        let base = base.map_err(system("map"))?;
        let base = NonNull::new(base.cast()).expect("the system maps nothing at address zero by itself");
        Ok(Segment { base, layout })
    }

    /// Ranks of the group.
    pub(super) fn ranks(&self) -> usize {
        self.layout.ranks
    }

    /// Ranks that have arrived at the meeting.
    pub(super) fn arrived(&self) -> &AtomicU32 {
        self.word(layout::ARRIVED_AT)
    }

    /// Meetings held, and whether the group is aborted.
    pub(super) fn state(&self) -> &AtomicU32 {
        self.word(layout::STATE_AT)
    }

    /// Ranks that sleep until the state changes.
    pub(super) fn sleepers(&self) -> &AtomicU32 {
        self.word(layout::SLEEPERS_AT)
    }

    /// Zero, or one more than the speaker whose reason counts.
    pub(super) fn aborted_by(&self) -> &AtomicU32 {
        self.word(layout::ABORTED_BY_AT)
    }

    /// Zero until a member takes the rank.
    pub(super) fn claim(&self, rank: usize) -> &AtomicU32 {
        assert!(rank < self.ranks(), "no such rank");
        self.word(self.layout.claim(rank))
    }

    /// Writes what `speaker` has to say of an abort, cut at a whole character.
    ///
    /// # Safety
    /// The caller is the only one that ever writes for this speaker, and does so once, before it points
    /// [`Segment::aborted_by`] to it.
    pub(super) unsafe fn write_reason(&self, speaker: usize, reason: &str) {
        assert!(speaker <= self.ranks(), "no such speaker");
        let mut len = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(len) {
            len -= 1;
        }
        let at = self.layout.reason(speaker);
        // SAFETY: the text lies within the mapping; nobody reads it before it is pointed to, nobody else writes it.
        let text = unsafe { slice::from_raw_parts_mut(self.at::<u8>(at + LINE_BYTES, len), len) };
        text.copy_from_slice(&reason.as_bytes()[..len]);
        self.word(at).store(len as u32, Relaxed);
    }

    /// The reason that counts, as soon as there is one.
    pub(super) fn reason(&self) -> Option<String> {
        let speaker = (self.aborted_by().load(Acquire) as usize).checked_sub(1)?;
        if speaker > self.ranks() {
            return Some("for a reason that cannot be read".to_owned());
        }
        let at = self.layout.reason(speaker);
        let len = (self.word(at).load(Relaxed) as usize).min(REASON_BYTES_MAX);
        // SAFETY: the text lies within the mapping, and was written for good before it was pointed to.
        let text = unsafe { slice::from_raw_parts(self.at::<u8>(at + LINE_BYTES, len), len) };
        Some(String::from_utf8_lossy(text).into_owned())
    }

    /// Lays out a part of `rank`.
    ///
    /// # Safety
    /// The caller is this rank's only member. No rank reads its place of this parity: all have met since the last part
    /// was laid out there, and met once more after the last of them had read it.
    pub(super) unsafe fn write_part(&self, rank: usize, parity: usize, part: &Part<'_>) {
        let len = part.numbers.len().max(part.bytes.len());
        let (head, at) = (self.layout.head(rank, parity), self.layout.numbers(rank, parity));
        assert!(
            part.numbers.len() <= PIECE_MAX && part.bytes.len() <= EXCHANGE_BYTES_MAX,
            "cut by the board"
        );
        self.word(head + layout::PART_OPERATION_AT).store(number_of(part.operation), Relaxed);
        self.word(head + layout::PART_LEN_AT).store(len as u32, Relaxed);
        self.long(head + layout::PART_CALL_LEN_AT).store(part.call_len as u64, Relaxed);
        // SAFETY: the place lies within the mapping, and is the caller's alone until it comes to the meeting. One of
        // the two is empty.
        unsafe {
            let numbers = self.at::<f32>(at, part.numbers.len());
            std::ptr::copy_nonoverlapping(part.numbers.as_ptr(), numbers, part.numbers.len());
            let bytes = self.at::<u8>(at, part.bytes.len());
            std::ptr::copy_nonoverlapping(part.bytes.as_ptr(), bytes, part.bytes.len());
        }
    }

    /// A part of `rank`.
    ///
    /// # Safety
    /// The caller has met all others since the part was laid out, and does not come to the meeting after the next
    /// before it has dropped the result.
    pub(super) unsafe fn part(&self, rank: usize, parity: usize) -> Part<'_> {
        let (head, at) = (self.layout.head(rank, parity), self.layout.numbers(rank, parity));
        let operation = operation_of(self.word(head + layout::PART_OPERATION_AT).load(Relaxed));
        let len = self.word(head + layout::PART_LEN_AT).load(Relaxed) as usize;
        let call_len = self.long(head + layout::PART_CALL_LEN_AT).load(Relaxed);
        let (numbers, bytes) = match operation {
            Operation::Exchange => (0, len.min(EXCHANGE_BYTES_MAX)),
            _ => (len.min(PIECE_MAX), 0),
        };
        // SAFETY: both lie within the mapping, are aligned, and any bits are numbers. Nobody writes there meanwhile,
        // as the caller sees to.
        let (numbers, bytes) = unsafe {
            (
                slice::from_raw_parts(self.at::<f32>(at, numbers), numbers),
                slice::from_raw_parts(self.at::<u8>(at, bytes), bytes),
            )
        };
        Part { operation, call_len: usize::try_from(call_len).unwrap_or(usize::MAX), numbers, bytes }
    }

    /// Where `rank` lays out a sum.
    ///
    /// # Safety
    /// As for [`Segment::write_part`]; and there is no other view of it.
    #[expect(clippy::mut_from_ref, reason = "the memory is not behind the reference but in the segment")]
    pub(super) unsafe fn segment_mut(&self, rank: usize, parity: usize, len: usize) -> &mut [f32] {
        assert!(len <= self.layout.segment_len_max(), "a share of a piece");
        // SAFETY: it lies within the mapping, is aligned, any bits are numbers, and it is the caller's alone.
        unsafe { slice::from_raw_parts_mut(self.at(self.layout.segment(rank, parity), len), len) }
    }

    /// A sum that `rank` has laid out.
    ///
    /// # Safety
    /// As for [`Segment::part`].
    pub(super) unsafe fn segment(&self, rank: usize, parity: usize, len: usize) -> &[f32] {
        assert!(len <= self.layout.segment_len_max(), "a share of a piece");
        // SAFETY: it lies within the mapping, is aligned, any bits are numbers, and nobody writes there meanwhile.
        unsafe { slice::from_raw_parts(self.at(self.layout.segment(rank, parity), len), len) }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned, as `at` checks; nothing but atomics ever reaches these bytes.
        unsafe { AtomicU32::from_ptr(self.at(at, 1)) }
    }

    fn long(&self, at: usize) -> &AtomicU64 {
        // SAFETY: likewise.
        unsafe { AtomicU64::from_ptr(self.at(at, 1)) }
    }

    /// The address of `len` values at an offset, checked.
    fn at<T>(&self, at: usize, len: usize) -> *mut T {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(at));
        assert!(end.is_some_and(|end| end <= self.layout.bytes), "beyond the segment");
        assert!(at.is_multiple_of(align_of::<T>()), "not aligned");
        // SAFETY: within one mapping, as was just checked.
        unsafe { self.base.as_ptr().add(at).cast() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that was made with this length, and every view borrows from `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.bytes) } {
            tracing::warn!(%error, "cannot unmap the shared memory of a group");
        }
    }
}

fn system(action: &'static str) -> impl Fn(rustix::io::Errno) -> SharedMemoryError {
    move |error| SharedMemoryError::System { action, source: error.into() }
}

/// An operation as a word; zero stands for none.
fn number_of(operation: Operation) -> u32 {
    match operation {
        Operation::Unknown => 0,
        Operation::AllReduceSum => 1,
        Operation::AllGather => 2,
        Operation::Broadcast => 3,
        Operation::Barrier => 4,
        Operation::Exchange => 5,
    }
}

fn operation_of(number: u32) -> Operation {
    const KNOWN: [Operation; 5] = [
        Operation::AllReduceSum,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Barrier,
        Operation::Exchange,
    ];
    KNOWN.into_iter().find(|known| number_of(*known) == number).unwrap_or_default()
}
