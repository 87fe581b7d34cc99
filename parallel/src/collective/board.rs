//! What ranks on one host do with each other's numbers, written once for threads and for processes.
//!
//! Each rank lays its part out in a place of its own, all meet, and everybody reads the places in rank order. Small
//! sums are made by every rank for itself; large ones by segments, each rank summing its own and laying it out. Both
//! add the same numbers in the same order, so every [`Board`] gives the same bits. Places come in pairs used
//! alternately, so that a fast rank may start the next exchange while a slow one still reads this one: whoever writes
//! a place anew has met the others since, who therefore have read it. Long arrays go through in pieces of
//! [`PIECE_MAX`], so a place stays within the cache and the group's memory is bounded whatever a model exchanges.

use std::sync::Arc;

use super::{CollectiveError, EXCHANGE_BYTES_MAX};
use crate::ids::Rank;

/// Up to this many elements every rank sums everything itself: one meeting instead of two.
pub(super) const ONE_SHOT_MAX: usize = 8192;
/// Most elements of one exchange: 256 KiB of each rank, together with the sums a fraction of an L2 cache.
pub(super) const PIECE_MAX: usize = 65_536;

/// What a rank takes part in: compared before a number is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Operation {
    /// Nothing yet, or nothing that is known here.
    #[default]
    Unknown,
    AllReduceSum,
    AllGather,
    Broadcast,
    Barrier,
    Exchange,
}

impl Operation {
    /// As it stands in an error.
    pub(super) fn name(self) -> &'static str {
        match self {
            Operation::Unknown => "an unknown operation",
            Operation::AllReduceSum => "all_reduce_sum",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
            Operation::Barrier => "barrier",
            Operation::Exchange => "exchange",
        }
    }
}

/// One rank's part of one exchange.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) operation: Operation,
    /// Elements of the whole call, of which `numbers` may be a piece.
    pub(super) call_len: usize,
    /// At most [`PIECE_MAX`].
    pub(super) numbers: &'a [f32],
    /// What an exchange of bytes carries, in place of `numbers`: at most [`EXCHANGE_BYTES_MAX`].
    pub(super) bytes: &'a [u8],
}

/// Where the ranks of a group meet and lay out what they bring; one rank's side of it.
pub(super) trait Board {
    fn rank(&self) -> Rank;
    fn size(&self) -> usize;
    /// The reason once the group is aborted.
    fn check(&self) -> Result<(), Arc<str>>;
    /// Returns once all ranks have called it; the reason where the group was aborted before or meanwhile.
    fn meet(&self) -> Result<(), Arc<str>>;
    /// Aborts the group; the first reason stays.
    fn abort(&self, reason: &str);
    /// Turns to the other of the two places and lays out this rank's part there.
    fn lay(&mut self, part: Part<'_>);
    /// What a rank has laid out. Called after the meeting behind [`Board::lay`] only.
    fn read<R>(&self, rank: usize, reader: impl FnOnce(Part<'_>) -> R) -> R;
    /// Lays out a sum of `len` elements, beside the part. Called likewise.
    fn lay_segment(&self, len: usize, fill: impl FnOnce(&mut [f32]));
    /// The `len` elements that a rank has summed. Called after one more meeting.
    fn read_segment(&self, rank: usize, len: usize, reader: impl FnOnce(&[f32]));
}

/// [`Collective::all_reduce_sum`](super::Collective::all_reduce_sum).
pub(super) fn all_reduce_sum(board: &mut impl Board, data: &mut [f32]) -> Result<(), CollectiveError> {
    if board.size() == 1 {
        return meet(board);
    }
    let call_len = data.len();
    if call_len == 0 {
        return sum_piece(board, 0, data);
    }
    data.chunks_mut(PIECE_MAX).try_for_each(|piece| sum_piece(board, call_len, piece))
}

/// Sums one piece of an array whose whole length is `call_len`.
fn sum_piece(board: &mut impl Board, call_len: usize, data: &mut [f32]) -> Result<(), CollectiveError> {
    const OPERATION: Operation = Operation::AllReduceSum;
    let (size, len) = (board.size(), data.len());
    publish(board, Part { operation: OPERATION, call_len, numbers: data, bytes: &[] })?;
    for rank in 0..size {
        let theirs = board.read(rank, |part| part.call_len);
        check(board, OPERATION.name(), call_len, theirs)?;
    }
    if call_len <= ONE_SHOT_MAX {
        return (0..size).try_for_each(|rank| {
            use_numbers(board, OPERATION, rank, len, |numbers| accumulate(data, numbers, rank))
        });
    }
    let segment = |rank: usize| len * rank / size..len * (rank + 1) / size;
    let mine = segment(board.rank().index());
    let mut outcome = Ok(());
    board.lay_segment(mine.len(), |sum| {
        outcome = (0..size).try_for_each(|rank| {
            use_numbers(board, OPERATION, rank, len, |numbers| accumulate(sum, &numbers[mine.clone()], rank))
        });
    });
    outcome?;
    meet(board)?;
    for rank in 0..size {
        let sum = &mut data[segment(rank)];
        board.read_segment(rank, sum.len(), |theirs| sum.copy_from_slice(theirs));
    }
    Ok(())
}

/// [`Collective::all_gather`](super::Collective::all_gather).
pub(super) fn all_gather(
    board: &mut impl Board,
    mine: &[f32],
    all: &mut [f32],
) -> Result<(), CollectiveError> {
    const OPERATION: Operation = Operation::AllGather;
    let piece_of = |len: usize, first: usize| len.min(first)..len.min(first + PIECE_MAX);
    let mut first = 0;
    loop {
        let numbers = &mine[piece_of(mine.len(), first)];
        publish(board, Part { operation: OPERATION, call_len: mine.len(), numbers, bytes: &[] })?;
        // Looked at once: what is checked is what is used.
        let lens: Vec<_> = (0..board.size()).map(|rank| board.read(rank, |part| part.call_len)).collect();
        let total = lens.iter().copied().fold(0, usize::saturating_add);
        check(board, OPERATION.name(), all.len(), total)?;
        let (mut start, mut longest) = (0, 0);
        for (rank, call_len) in lens.into_iter().enumerate() {
            let piece = piece_of(call_len, first);
            let theirs = &mut all[start + piece.start..start + piece.end];
            use_numbers(board, OPERATION, rank, piece.len(), |numbers| theirs.copy_from_slice(numbers))?;
            start += call_len;
            longest = longest.max(call_len);
        }
        first += PIECE_MAX;
        if first >= longest {
            return Ok(());
        }
    }
}

/// [`Collective::broadcast`](super::Collective::broadcast).
pub(super) fn broadcast(board: &mut impl Board, data: &mut [f32], root: Rank) -> Result<(), CollectiveError> {
    const OPERATION: Operation = Operation::Broadcast;
    if root.index() >= board.size() {
        return check(board, "broadcast from a rank", root.index(), board.size() - 1);
    }
    let call_len = data.len();
    let mut first = 0;
    while first == 0 || first < call_len {
        let range = first..call_len.min(first + PIECE_MAX);
        let numbers: &[f32] = if board.rank() == root { &data[range.clone()] } else { &[] };
        publish(board, Part { operation: OPERATION, call_len, numbers, bytes: &[] })?;
        for rank in 0..board.size() {
            let theirs = board.read(rank, |part| part.call_len);
            check(board, OPERATION.name(), call_len, theirs)?;
        }
        let own = &mut data[range];
        use_numbers(board, OPERATION, root.index(), own.len(), |numbers| own.copy_from_slice(numbers))?;
        first += PIECE_MAX;
    }
    Ok(())
}

/// [`Collective::barrier`](super::Collective::barrier).
pub(super) fn barrier(board: &mut impl Board) -> Result<(), CollectiveError> {
    publish(board, Part { operation: Operation::Barrier, call_len: 0, numbers: &[], bytes: &[] })
}

/// [`Collective::exchange`](super::Collective::exchange).
pub(super) fn exchange(board: &mut impl Board, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
    if mine.len() > EXCHANGE_BYTES_MAX {
        return Err(refuse(board, CollectiveError::TooLong { rank: board.rank(), bytes: mine.len() }));
    }
    publish(board, Part { operation: Operation::Exchange, call_len: 0, numbers: &[], bytes: mine })?;
    Ok((0..board.size()).map(|rank| board.read(rank, |part| part.bytes.to_vec())).collect())
}

/// Lays out this rank's part, waits for everybody's, and sees that all mean the same.
fn publish(board: &mut impl Board, part: Part<'_>) -> Result<(), CollectiveError> {
    // After an abort nobody waits any more, and a part written now would replace one that peers still read.
    board.check().map_err(|reason| CollectiveError::Aborted { rank: board.rank(), reason })?;
    board.lay(part);
    meet(board)?;
    for rank in 0..board.size() {
        let theirs = board.read(rank, |theirs| theirs.operation);
        if theirs != part.operation {
            let (operation, theirs) = (part.operation.name(), theirs.name());
            let peer = Rank(rank as u16);
            let error = CollectiveError::Disagreement { rank: board.rank(), operation, peer, theirs };
            return Err(refuse(board, error));
        }
    }
    Ok(())
}

/// Hands on the numbers that a rank has laid out, which are `len`.
fn use_numbers(
    board: &impl Board,
    operation: Operation,
    rank: usize,
    len: usize,
    user: impl FnOnce(&[f32]),
) -> Result<(), CollectiveError> {
    let theirs = board.read(rank, |part| {
        if part.numbers.len() == len {
            user(part.numbers);
        }
        part.numbers.len()
    });
    check(board, operation.name(), len, theirs)
}

fn meet(board: &impl Board) -> Result<(), CollectiveError> {
    board.meet().map_err(|reason| CollectiveError::Aborted { rank: board.rank(), reason })
}

fn check(
    board: &impl Board,
    operation: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), CollectiveError> {
    if got == expected {
        return Ok(());
    }
    Err(refuse(board, CollectiveError::Mismatch { rank: board.rank(), operation, got, expected }))
}

/// Ends the group, since ranks that disagree once will never agree again.
fn refuse(board: &impl Board, error: CollectiveError) -> CollectiveError {
    board.abort(&error.to_string());
    error
}

/// The sum in rank order: rank 0's numbers stand first, the others are added one rank after the other.
fn accumulate(sum: &mut [f32], part: &[f32], rank: usize) {
    if rank == 0 {
        sum.copy_from_slice(part);
    } else {
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
}
