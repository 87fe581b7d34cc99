//! Drawing tokens from logits in host memory: the part that all CPU models share.
//!
//! Logits come a bounded number of rows at a time and are the sampler's scratch. A row whose raw log-probabilities are
//! wanted is copied first.

#[cfg(test)]
mod tests;

use std::ops::Range;

use consort_kernels::{device::Device, sampling::sample};

use super::{Draw, Drawn, Model, ModelError, RowOutcome, RowRequest, TokenLogprobs};
use crate::{batch::Batch, collective::Collective, kv::KvStore};

/// A model whose logits come into host memory. [`DrawOnHost`] makes a [`Model`] of it.
pub trait HostModel: Send {
    /// See [`Model::join`].
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        let _ = comm;
        Ok(())
    }

    /// See [`Model::forward`]; keeps the output rows for [`HostModel::logits`].
    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError>;

    /// Logits `[rows.len(), vocabulary]` of kept rows, whole on every rank; at most [`HostModel::logit_rows_max`] rows
    /// a call. The caller may use them as scratch.
    fn logits(&mut self, rows: Range<usize>, comm: &mut dyn Collective) -> Result<&mut [f32], ModelError>;

    /// Most rows that one [`HostModel::logits`] call may ask for.
    fn logit_rows_max(&self) -> usize;

    /// Entries of the vocabulary, the width of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Whose threads draw tokens; the caller alone, where there is none.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// Bytes of weights this rank holds.
    fn weight_bytes(&self) -> u64;

    /// Bytes of activations this rank holds.
    fn workspace_bytes(&self) -> u64;
}

/// A [`HostModel`] with the sampler behind it.
pub struct DrawOnHost<M> {
    model: M,
    /// Output rows of the last forward.
    kept_rows: usize,
}

impl<M: HostModel> DrawOnHost<M> {
    /// Draws from the logits of `model`.
    pub fn new(model: M) -> Self {
        DrawOnHost { model, kept_rows: 0 }
    }
}

impl<M: HostModel> Model for DrawOnHost<M> {
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        self.kept_rows = 0;
        self.model.join(comm)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        self.kept_rows = 0;
        self.model.forward(batch, kv, comm)?;
        self.kept_rows = batch.output_rows.len();
        Ok(())
    }

    fn outcomes(
        &mut self,
        requests: &[RowRequest<'_>],
        report: bool,
        comm: &mut dyn Collective,
    ) -> Result<Vec<RowOutcome>, ModelError> {
        if requests.len() != self.kept_rows {
            let (asked, kept) = (requests.len(), self.kept_rows);
            return Err(ModelError::Batch(format!(
                "outcomes of {asked} rows were asked for; {kept} are kept"
            )));
        }
        let (vocab_size, rows_max) = (self.model.vocab_size(), self.model.logit_rows_max().max(1));
        let device = self.model.device().cloned();
        let mut outcomes = Vec::with_capacity(requests.len());
        for group in requests.chunks(rows_max) {
            let first = outcomes.len();
            let logits = self.model.logits(first..first + group.len(), comm)?;
            let of_row = |at: usize, row: &mut [f32]| outcome(row, &group[at], report);
            match &device {
                Some(device) => outcomes.extend(device.map_rows(logits, vocab_size, of_row)),
                None => {
                    let rows = logits.chunks_exact_mut(vocab_size).enumerate();
                    outcomes.extend(rows.map(|(at, row)| of_row(at, row)));
                }
            }
        }
        Ok(outcomes)
    }

    fn logits(&mut self, rows: Range<usize>, comm: &mut dyn Collective) -> Result<&[f32], ModelError> {
        Ok(self.model.logits(rows, comm)?)
    }

    fn logit_rows_max(&self) -> usize {
        self.model.logit_rows_max()
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.model.workspace_bytes()
    }
}

/// What becomes of one row, which is used up.
fn outcome(row: &mut [f32], request: &RowRequest<'_>, report: bool) -> RowOutcome {
    let prompt = request.prompt.filter(|_| report).map(|of| TokenLogprobs::of(row, of.token, of.top));
    let drawn = request.draw.as_ref().map(|draw| drawn(row, draw, report));
    RowOutcome { prompt, drawn }
}

fn drawn(row: &mut [f32], draw: &Draw<'_>, report: bool) -> Drawn {
    let wants_logprobs = draw.logprobs.filter(|_| report);
    // The sampler writes in the row.
    let raw = wants_logprobs.map(|_| row.to_vec());
    draw.sampling.adjustments.apply(row, draw.history);
    let token = sample(row, draw.sampling, draw.position);
    let logprobs =
        token.zip(wants_logprobs).zip(raw).map(|((token, top), raw)| TokenLogprobs::of(&raw, token, top));
    Drawn { token, logprobs }
}
