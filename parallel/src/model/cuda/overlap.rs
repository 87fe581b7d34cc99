//! Steps enqueued behind one that the device computes.
//!
//! All that a step reads on the device is copied there in order with the work, through page-locked memory that keeps
//! what was not copied yet; tokens that the step before draws are looked up where it leaves them. So nothing of one
//! step is overwritten by the host's work for the next, but for results, which [`UnderWay`](super::under_way::UnderWay)
//! takes care of.

use std::time::Duration;

use super::{
    super::{ModelError, Overlap, RowOutcome, RowRequest},
    CudaLlama,
    draws::{self, Rows},
    group,
    under_way::Ended,
};
use crate::{batch::Batch, collective::Collective, kv::KvStore};

impl CudaLlama {
    fn begin_step(
        &mut self,
        batch: &Batch,
        requests: &[RowRequest<'_>],
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        self.under_way.check_room()?;
        let (asked, kept) = (requests.len(), batch.output_rows.len());
        if asked != kept || !self.takes(requests) {
            return Err(ModelError::Batch(format!("{asked} requests of a step that keeps {kept} rows")));
        }
        self.kept_rows = 0;
        self.launch(batch, self.under_way.drawn(), kv, comm)?;
        for drawn in draws::groups(requests, self.shape.vocabulary)? {
            self.begin_group_work(comm)?;
            self.make_logits(drawn.rows.clone(), comm)?;
            let (device, shape, buffers) = (&*self.device, &self.shape, &mut self.buffers);
            let mut rows = Rows { device, shape, buffers, report: false, limit: self.step_limit };
            rows.draw_in_place(&drawn)?;
        }
        let draws = requests.iter().map(|request| request.draw.is_some()).collect();
        let stop_words = self.group.as_ref().map(|_| group::stop_words(&self.buffers.area));
        self.under_way.push(self.buffers.tokens.slice(0..kept), draws, stop_words)
    }

    fn finish_step(
        &mut self,
        patience: Duration,
        comm: &mut dyn Collective,
    ) -> Result<Option<Vec<RowOutcome>>, ModelError> {
        let ended = self.under_way.finish(patience, self.step_limit)?;
        let Some(Ended { outcomes, stop_words }) = ended else { return Ok(None) };
        if let (Some(group), Some(words)) = (&mut self.group, stop_words) {
            match self.under_way.is_empty() {
                true => group.end(),
                false => group.goes_on(),
            }
            group.judge(words, comm)?;
        }
        Ok(Some(outcomes))
    }
}

impl Overlap for CudaLlama {
    /// Not where log-probabilities are wanted: they come to the host before the memory of their logits is used again.
    fn takes(&self, requests: &[RowRequest<'_>]) -> bool {
        let tells = |request: &RowRequest<'_>| {
            request.prompt.is_some() || request.draw.is_some_and(|draw| draw.logprobs.is_some())
        };
        !requests.iter().any(tells)
    }

    fn begin(
        &mut self,
        batch: &Batch,
        requests: &[RowRequest<'_>],
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        let begun = self.begin_step(batch, requests, kv, comm);
        if begun.is_err() {
            self.under_way.give_up();
        }
        begun
    }

    fn finish(
        &mut self,
        patience: Duration,
        comm: &mut dyn Collective,
    ) -> Result<Option<Vec<RowOutcome>>, ModelError> {
        let finished = self.finish_step(patience, comm);
        if finished.is_err() {
            self.under_way.give_up();
        }
        finished
    }
}
