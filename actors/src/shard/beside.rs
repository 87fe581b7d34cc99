//! A model that begins steps beside the host, for tests: it computes each at once, and says so late.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use consort_parallel::{
    batch::Batch,
    collective::Collective,
    kv::KvStore,
    model::{Model, ModelError, Overlap, RowOutcome, RowRequest, STEPS_UNDER_WAY_MAX, row_of},
};

/// What such a model came to do, for all ranks together.
#[derive(Default)]
pub(super) struct Seen {
    /// Steps that were begun with another under way.
    pub(super) beside: AtomicUsize,
    /// Tokens that were named by the rows that draw them.
    pub(super) named: AtomicUsize,
    /// Steps that were computed in one go.
    pub(super) at_once: AtomicUsize,
    /// Where not zero, the next step that is finished fails.
    pub(super) faults: AtomicUsize,
}

/// The model within, whose steps may be under way.
pub(super) struct Beside {
    model: Box<dyn Model>,
    under_way: VecDeque<Vec<RowOutcome>>,
    /// How often the oldest step is still said not to have ended.
    delay: usize,
    steps: usize,
    /// What the rows of the step that was begun last draw.
    drawn: Vec<u32>,
    seen: Arc<Seen>,
}

impl Beside {
    pub(super) fn new(model: Box<dyn Model>, seen: &Arc<Seen>) -> Self {
        let (under_way, drawn) = (VecDeque::new(), Vec::new());
        Self { model, under_way, delay: 0, steps: 0, drawn, seen: Arc::clone(seen) }
    }

    /// Puts the tokens themselves where their rows stand.
    fn with_tokens(&self, batch: &Batch) -> Batch {
        let mut batch = batch.clone();
        for token in &mut batch.tokens {
            if let Some(row) = row_of(*token) {
                assert!(!self.under_way.is_empty(), "row {row} of a step that is over");
                self.seen.named.fetch_add(1, SeqCst);
                *token = self.drawn[row];
            }
        }
        batch
    }
}

impl Model for Beside {
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        self.under_way.clear();
        self.model.join(comm)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        assert!(self.under_way.is_empty(), "a step at once, with others under way");
        assert!(batch.tokens.iter().all(|token| row_of(*token).is_none()), "tokens that nobody named");
        self.seen.at_once.fetch_add(1, SeqCst);
        self.model.forward(batch, kv, comm)
    }

    fn outcomes(
        &mut self,
        requests: &[RowRequest<'_>],
        report: bool,
        comm: &mut dyn Collective,
    ) -> Result<Vec<RowOutcome>, ModelError> {
        self.model.outcomes(requests, report, comm)
    }

    fn logits(
        &mut self,
        rows: std::ops::Range<usize>,
        comm: &mut dyn Collective,
    ) -> Result<&[f32], ModelError> {
        self.model.logits(rows, comm)
    }

    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        Some(self)
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

impl Overlap for Beside {
    fn takes(&self, requests: &[RowRequest<'_>]) -> bool {
        requests.iter().all(|row| row.prompt.is_none() && row.draw.is_none_or(|draw| draw.logprobs.is_none()))
    }

    fn begin(
        &mut self,
        batch: &Batch,
        requests: &[RowRequest<'_>],
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        assert!(self.under_way.len() < STEPS_UNDER_WAY_MAX && self.takes(requests));
        let batch = self.with_tokens(batch);
        self.model.forward(&batch, kv, comm)?;
        let outcomes = self.model.outcomes(requests, false, comm)?;
        let token = |outcome: &RowOutcome| outcome.drawn.as_ref().and_then(|drawn| drawn.token).unwrap_or(0);
        self.drawn = outcomes.iter().map(token).collect();
        self.seen.beside.fetch_add(usize::from(!self.under_way.is_empty()), SeqCst);
        self.under_way.push_back(outcomes);
        Ok(())
    }

    fn finish(
        &mut self,
        _patience: Duration,
        comm: &mut dyn Collective,
    ) -> Result<Option<Vec<RowOutcome>>, ModelError> {
        if self.delay > 0 {
            self.delay -= 1;
            return Ok(None);
        }
        self.steps += 1;
        self.delay = self.steps % 3;
        if self.seen.faults.swap(0, SeqCst) > 0 {
            self.under_way.clear();
            return Err(ModelError::Batch("injected fault".to_owned()));
        }
        // Where it is seen that the group was aborted.
        if let Err(error) = comm.barrier() {
            self.under_way.clear();
            return Err(error.into());
        }
        Ok(Some(self.under_way.pop_front().expect("a step under way")))
    }
}
