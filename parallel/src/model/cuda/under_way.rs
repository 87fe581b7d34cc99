//! Steps that the device computes while the host is ahead of it, and where their results come to.
//!
//! What a step leaves on the device, the next one overwrites: so its results are copied to the host behind it, each
//! step's to a place of its own, with the words that say whether this rank's device had stopped by then.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::STOP_WORDS,
    cuda::{
        DeviceSlice,
        device::{CudaDevice, CudaError, Landing},
    },
    sampling::cuda::NO_TOKEN,
};

use super::super::{Drawn, ModelError, RowOutcome, STEPS_UNDER_WAY_MAX};

/// The steps under way, oldest first, and room for the results of as many as may be.
pub(super) struct UnderWay {
    steps: VecDeque<StepUnderWay>,
    idle: Vec<Landing>,
    /// When the oldest of the steps could begin: as it was enqueued, or as the one before it had ended.
    since: Instant,
    /// Whether the host has lost sight of the device's work: nothing is begun until it has ended.
    is_broken: bool,
}

struct StepUnderWay {
    results: Landing,
    /// Of each output row, whether it draws.
    draws: Vec<bool>,
}

/// What a step has left.
pub(super) struct Ended {
    pub(super) outcomes: Vec<RowOutcome>,
    /// Of a rank among others.
    pub(super) stop_words: Option<[u32; STOP_WORDS]>,
}

impl UnderWay {
    /// For steps of `rows` output rows at most.
    pub(super) fn new(device: &Arc<CudaDevice>, rows: usize) -> Result<UnderWay, CudaError> {
        let places = (0..STEPS_UNDER_WAY_MAX).map(|_| Landing::new(device, rows + STOP_WORDS));
        let idle = places.collect::<Result<_, _>>()?;
        Ok(UnderWay { steps: VecDeque::new(), idle, since: Instant::now(), is_broken: false })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Rows of which the device draws a token, in the step that was begun last.
    pub(super) fn drawn(&self) -> usize {
        self.steps.back().map_or(0, |step| step.draws.len())
    }

    /// Refuses a step that cannot be begun now.
    pub(super) fn check_room(&self) -> Result<(), ModelError> {
        if self.is_broken {
            return Err(ModelError::Batch("a step after one that failed, and before a meeting".to_owned()));
        }
        if self.idle.is_empty() {
            let under_way = self.steps.len();
            return Err(ModelError::Batch(format!("a step more than the {under_way} that may be under way")));
        }
        Ok(())
    }

    /// A step was enqueued. Its results are copied behind it: the drawn tokens, one for each output row, and the stop
    /// words of a rank among others.
    pub(super) fn push(
        &mut self,
        tokens: DeviceSlice<'_, u32>,
        draws: Vec<bool>,
        stop_words: Option<DeviceSlice<'_, u32>>,
    ) -> Result<(), ModelError> {
        self.check_room()?;
        let mut results = self.idle.pop().expect("there is room");
        let parts: Vec<_> = [tokens].into_iter().chain(stop_words).collect();
        if self.steps.is_empty() {
            self.since = Instant::now();
        }
        let fetched = results.fetch(&parts);
        match fetched {
            Ok(()) => self.steps.push_back(StepUnderWay { results, draws }),
            Err(_) => self.idle.push(results),
        }
        Ok(fetched?)
    }

    /// Waits for the oldest step, no longer than `patience`; an error where it takes longer than `limit`.
    pub(super) fn finish(
        &mut self,
        patience: Duration,
        limit: Duration,
    ) -> Result<Option<Ended>, ModelError> {
        let Some(step) = self.steps.front_mut() else {
            return Err(ModelError::Batch(
                "the end of a step is waited for, and none is under way".to_owned(),
            ));
        };
        let found = step.results.take(patience, self.since, limit).map_err(KernelError::from)?;
        let Some(words) = found else { return Ok(None) };
        let (tokens, stop_words) = words.split_at(step.draws.len());
        let outcomes = tokens.iter().zip(&step.draws).map(|(&token, &draws)| {
            let token = (token != NO_TOKEN).then_some(token);
            RowOutcome { prompt: None, drawn: draws.then_some(Drawn { token, logprobs: None }) }
        });
        let ended = Ended { outcomes: outcomes.collect(), stop_words: stop_words.try_into().ok() };
        self.since = Instant::now();
        if let Some(step) = self.steps.pop_front() {
            self.idle.push(step.results);
        }
        Ok(Some(ended))
    }

    /// The host turns away from what is under way.
    pub(super) fn give_up(&mut self) {
        self.is_broken = true;
        for mut step in self.steps.drain(..) {
            step.results.reset();
            self.idle.push(step.results);
        }
    }

    /// The device has ended all its work, and a new life begins.
    pub(super) fn restart(&mut self) {
        self.give_up();
        self.is_broken = false;
    }
}
