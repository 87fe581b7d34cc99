//! Steps of which one is enqueued while another is computed.
//!
//! A model whose device computes by itself gives its results later: then the next step can be planned and enqueued
//! meanwhile, and the device goes from one to the next without a pause. What a sequence appends in the next step is a
//! token that nobody on the host knows yet, so the batch says where it will be: see [`drawn_by`].

use std::time::Duration;

use consort_kernels::embedding::cuda::DRAWN;

use super::{ModelError, RowOutcome, RowRequest};
use crate::{batch::Batch, collective::Collective, kv::KvStore};

/// Steps that are under way together at most.
pub const STEPS_UNDER_WAY_MAX: usize = 2;

/// What stands in [`Batch::tokens`] for the token that output row `row` of the step before draws.
pub fn drawn_by(row: usize) -> u32 {
    debug_assert!(row < DRAWN as usize, "row {row}");
    DRAWN | row as u32
}

/// The output row that a token of [`Batch::tokens`] stands for, if it is no token itself.
pub fn row_of(token: u32) -> Option<usize> {
    (token & DRAWN != 0).then_some((token & !DRAWN) as usize)
}

/// Steps in two halves. Every rank of a group begins the same steps in the same order, and among them those that it
/// runs by [`Model::forward`](super::Model::forward), which needs none to be under way.
///
/// After an error nothing is under way for the caller, and no step can be begun before
/// [`Model::join`](super::Model::join): what the device still does for steps that had begun is the model's concern.
pub trait Overlap {
    /// Whether a step with these requests can be begun: a few kinds of steps need the host in between. The answer is
    /// the same on every rank.
    fn takes(&self, requests: &[RowRequest<'_>]) -> bool;

    /// Enqueues a step, its draws included, and returns without waiting for the device. At most
    /// [`STEPS_UNDER_WAY_MAX`] are under way together, this one included; that there is room, and that the step can be
    /// begun, is the caller's to see to. `requests` are those of [`Model::outcomes`](super::Model::outcomes); tokens of
    /// the batch may be [`drawn_by`] rows of the step under way that was begun last.
    fn begin(
        &mut self,
        batch: &Batch,
        requests: &[RowRequest<'_>],
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError>;

    /// Waits for the oldest step under way, `patience` at most, and gives its outcomes; `None` where it has not ended
    /// by then. It is an error where there is none, and where it takes longer than the model's limit for a step since
    /// the one before it has ended.
    fn finish(
        &mut self,
        patience: Duration,
        comm: &mut dyn Collective,
    ) -> Result<Option<Vec<RowOutcome>>, ModelError>;
}
