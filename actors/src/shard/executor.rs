//! The real executor: a model's rank, its KV pages, and the sequences that the plans speak of.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use consort_parallel::{
    batch::Batch,
    collective::Collective,
    kv::KvStore,
    model::{Model, STEP_LIMIT, STEPS_UNDER_WAY_MAX},
};

use super::{
    Pipeline, Rejoined, ShardExecutor,
    sequence::{SequenceState, WantedRow},
    step::BegunStep,
};
use crate::{
    error::ShardError,
    ids::{Epoch, SequenceId, Step},
    plan::{GroupImage, SequenceImage, StepPlan, StepResult},
};

/// Executes plans with a [`Model`]. Every rank computes the same tokens; rank 0 reports them. Knows nothing of the
/// device: whether its memory is the host's is the model's and the pages' concern.
///
/// Where the model can begin a step while another is computed, it does; see [`Pipeline`].
pub struct ModelExecutor {
    pub(super) model: Box<dyn Model>,
    pub(super) kv: KvStore,
    pub(super) comm: Box<dyn Collective>,
    /// Whether steps may be under way together.
    overlaps: bool,
    /// Whether the model has met its peers in this epoch.
    joined: bool,
    pub(super) fence: StepFence,
    pub(super) sequences: BTreeMap<SequenceId, SequenceState>,
    pub(super) batch: Batch,
    /// What each output row of the batch is for.
    pub(super) wanted: Vec<WantedRow>,
    /// Steps whose results were not told, oldest first.
    pub(super) begun: VecDeque<BegunStep>,
    /// Why this epoch was cut short, in a step or before the first. Until the next epoch no plan can be carried out.
    aborted: Option<String>,
}

/// Admits plans of one epoch, one step after another.
pub(super) struct StepFence {
    /// Unknown until the first plan, which must be step 0.
    epoch: Option<Epoch>,
    next: Step,
}

impl StepFence {
    pub(super) fn admit(&mut self, plan: &StepPlan) -> Result<(), ShardError> {
        let expected = *self.epoch.get_or_insert(plan.epoch);
        if plan.epoch != expected {
            return Err(ShardError::WrongEpoch { got: plan.epoch, expected });
        }
        if plan.step != self.next {
            return Err(ShardError::WrongStep { got: plan.step, expected: self.next });
        }
        self.next = plan.step.next();
        Ok(())
    }
}

impl ModelExecutor {
    /// An executor without sequences, which has not joined its group yet. Its epoch is that of the first plan.
    pub fn new(model: Box<dyn Model>, kv: KvStore, comm: Box<dyn Collective>) -> Self {
        let groups = kv.layout().groups;
        Self {
            model,
            kv,
            comm,
            overlaps: true,
            joined: false,
            fence: StepFence { epoch: None, next: Step(0) },
            sequences: BTreeMap::new(),
            batch: Batch::new(groups),
            wanted: Vec::new(),
            begun: VecDeque::new(),
            aborted: None,
        }
    }

    /// Whether a step may be begun while another is computed, where the model can do that. It may unless it is said
    /// otherwise; what comes of the steps is the same.
    pub fn with_overlap(mut self, overlaps: bool) -> Self {
        self.overlaps = overlaps;
        self
    }

    /// Takes the place of an executor that has carried out everything up to `image`: its pages are this one's, and what
    /// it knew of sequences is learnt anew.
    pub fn learn(&mut self, image: &GroupImage) {
        self.fence = StepFence { epoch: Some(image.epoch), next: image.next_step };
        self.aborted = None;
        self.begun.clear();
        let known = |sequence: &SequenceImage| (sequence.new.sequence, SequenceState::of_image(sequence));
        self.sequences = image.sequences.iter().map(known).collect();
    }

    /// Does `work` of this epoch, unless the epoch was cut short: then, and if `work` is aborted, this rank is sound
    /// and waits for the next. After an error no step is under way any more.
    fn in_epoch<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<R, ShardError>,
    ) -> Result<R, ShardError> {
        if let Some(reason) = &self.aborted {
            return Err(ShardError::Aborted { reason: reason.clone() });
        }
        let result = work(self);
        if result.is_err() {
            self.begun.clear();
        }
        if let Err(ShardError::Aborted { reason }) = &result {
            self.aborted = Some(reason.clone());
        }
        result
    }

    fn meet_peers(&mut self) -> Result<(), ShardError> {
        if !self.joined {
            self.model.join(self.comm.as_mut()).map_err(ShardError::join)?;
            self.joined = true;
        }
        Ok(())
    }
}

impl ShardExecutor for ModelExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        self.in_epoch(Self::meet_peers)
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        // A plan made ahead may follow an aborted step: it misses that step's tokens, which is nobody's mistake.
        self.in_epoch(|executor| {
            // Whoever drives an executor without a group's protocol joins with the first step.
            executor.meet_peers()?;
            executor.carry_out(plan)
        })
    }

    fn pipeline(&mut self) -> Option<&mut dyn Pipeline> {
        match self.overlaps && self.model.overlap().is_some() {
            true => Some(self),
            false => None,
        }
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        // The new epoch knows nothing of the old one's transfers, and gives their pages away.
        self.kv.finish_transfers(STEP_LIMIT).map_err(ShardError::load)?;
        self.comm = comm;
        self.joined = false;
        self.fence = StepFence { epoch: Some(epoch), next: Step(0) };
        self.sequences.clear();
        self.begun.clear();
        self.aborted = None;
        Ok(Rejoined::Kept)
    }
}

impl Pipeline for ModelExecutor {
    fn depth(&self) -> usize {
        STEPS_UNDER_WAY_MAX
    }

    fn begin(&mut self, plan: &Arc<StepPlan>) -> Result<(), ShardError> {
        self.in_epoch(|executor| {
            executor.meet_peers()?;
            executor.begin_step(plan, true)
        })
    }

    fn finish(&mut self, patience: Duration) -> Result<Option<StepResult>, ShardError> {
        self.in_epoch(|executor| executor.finish_step(patience))
    }
}
