//! What lies where in a segment, as a function of the number of ranks alone.

use super::super::board::PIECE_MAX;

/// Most ranks of a group: 130 MiB of shared memory, and more processes than a host has sockets for.
pub const RANKS_MAX: usize = 256;

/// What two cores write lies on different lines; 128 bytes, since neighbouring lines are fetched in pairs.
pub(super) const LINE_BYTES: usize = 128;
/// Most bytes of the reason of an abort.
pub(super) const REASON_BYTES_MAX: usize = 256;

/// "CnsrtShm" in the order of the bytes of a little-endian host.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"CnsrtShm");
/// Changes with anything in this file and with what the words mean.
pub(super) const VERSION: u64 = 1;

/// Words of 64 bits that say what a segment is.
pub(super) const MAGIC_AT: usize = 0;
pub(super) const VERSION_AT: usize = 8;
pub(super) const RANKS_AT: usize = 16;
pub(super) const PIECE_MAX_AT: usize = 24;
pub(super) const BYTES_AT: usize = 32;
/// Words of 32 bits that change: see `meeting.rs` and `life.rs`.
pub(super) const ARRIVED_AT: usize = LINE_BYTES;
pub(super) const STATE_AT: usize = 2 * LINE_BYTES;
pub(super) const SLEEPERS_AT: usize = 3 * LINE_BYTES;
pub(super) const ABORTED_BY_AT: usize = 4 * LINE_BYTES;
/// The same for every number of ranks.
pub(super) const HEADER_BYTES: usize = 5 * LINE_BYTES;

/// A reason: its length, then its text on the lines behind.
const REASON_STRIDE: usize = LINE_BYTES + REASON_BYTES_MAX;
/// The head of a part: 32 bits of operation, 32 of length, 64 of the call's length.
pub(super) const PART_OPERATION_AT: usize = 0;
pub(super) const PART_LEN_AT: usize = 4;
pub(super) const PART_CALL_LEN_AT: usize = 8;
/// Where numbers begin and end, so that no page is shared by two ranks.
const PAGE_BYTES: usize = 4096;

/// Offsets of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) ranks: usize,
    reasons: usize,
    heads: usize,
    numbers: usize,
    segments: usize,
    segment_stride: usize,
    /// The whole segment.
    pub(super) bytes: usize,
}

impl Layout {
    /// For a group of `ranks`, which the caller has checked.
    pub(super) fn of(ranks: usize) -> Self {
        let claims = HEADER_BYTES;
        let reasons = claims + ranks * LINE_BYTES;
        // One for each rank's member, one for whoever made the segment.
        let heads = reasons + (ranks + 1) * REASON_STRIDE;
        let numbers = (heads + 2 * ranks * LINE_BYTES).next_multiple_of(PAGE_BYTES);
        let segments = numbers + 2 * ranks * PIECE_MAX * size_of::<f32>();
        let longest = PIECE_MAX.div_ceil(ranks) * size_of::<f32>();
        let segment_stride = longest.next_multiple_of(PAGE_BYTES);
        let bytes = segments + 2 * ranks * segment_stride;
        Layout { ranks, reasons, heads, numbers, segments, segment_stride, bytes }
    }

    /// The word with which a member takes its rank.
    pub(super) fn claim(&self, rank: usize) -> usize {
        HEADER_BYTES + rank * LINE_BYTES
    }

    /// The length of the reason that speaker `speaker` gives; its text is on the next line.
    pub(super) fn reason(&self, speaker: usize) -> usize {
        self.reasons + speaker * REASON_STRIDE
    }

    /// The head of a part.
    pub(super) fn head(&self, rank: usize, parity: usize) -> usize {
        self.heads + (2 * rank + parity) * LINE_BYTES
    }

    /// The numbers or bytes of a part: room for [`PIECE_MAX`] numbers.
    pub(super) fn numbers(&self, rank: usize, parity: usize) -> usize {
        self.numbers + (2 * rank + parity) * PIECE_MAX * size_of::<f32>()
    }

    /// The segment that a rank sums.
    pub(super) fn segment(&self, rank: usize, parity: usize) -> usize {
        self.segments + (2 * rank + parity) * self.segment_stride
    }

    /// Numbers that a segment has room for.
    pub(super) fn segment_len_max(&self) -> usize {
        self.segment_stride / size_of::<f32>()
    }
}
