//! How a step is decided: decodes first, then prefill chunks, then admissions, all under one token budget.

use super::{
    STEPS_IN_FLIGHT_MAX,
    pool::Admission,
    sequence::PlannedSpan,
    state::{Scheduler, StepInFlight},
};
use crate::{
    ids::SequenceId,
    plan::{NewSequence, Span, StepPlan},
};

/// A step in the making.
struct Draft {
    budget: usize,
    begin: Vec<NewSequence>,
    run: Vec<Span>,
    planned: Vec<PlannedSpan>,
    /// Quarantined blocks that a stalled decode waits for: nobody is preempted for these.
    awaited: usize,
    /// Whether a decode went without its block. Nothing is admitted then: the next free blocks are spoken for.
    pressed: bool,
}

/// What came of asking for a block.
enum Obtained {
    Block(consort_parallel::ids::BlockId),
    /// Blocks come free when a step in flight is absorbed.
    Stalled,
    /// The asking sequence was itself the newest.
    Preempted,
}

impl Scheduler {
    /// Decides the next step, or says that there is none now: nothing to run, or enough in flight.
    pub fn plan(&mut self) -> Option<StepPlan> {
        if self.in_flight.len() >= STEPS_IN_FLIGHT_MAX {
            return None;
        }
        let mut draft = Draft {
            budget: self.config.max_num_batched_tokens,
            begin: Vec::new(),
            run: Vec::new(),
            planned: Vec::new(),
            awaited: 0,
            pressed: false,
        };
        self.plan_decodes(&mut draft);
        self.plan_prefills(&mut draft);
        if !draft.pressed {
            self.plan_admissions(&mut draft);
        }
        if draft.run.is_empty() {
            return None;
        }
        let step = self.next_step;
        self.next_step = step.next();
        self.in_flight.push_back(StepInFlight { step, spans: draft.planned });
        let end = std::mem::take(&mut self.ending).into_iter().collect();
        Some(StepPlan {
            epoch: self.epoch,
            step,
            begin: draft.begin,
            run: draft.run,
            copies: Vec::new(),
            end,
        })
    }

    fn plan_decodes(&mut self, draft: &mut Draft) {
        let candidates: Vec<SequenceId> = self.running.iter().copied().collect();
        for sequence in candidates {
            if draft.budget == 0 {
                break;
            }
            // Preempted for an older one in this very loop: no longer running.
            let Some(state) = self.sequences.get(&sequence).filter(|_| self.running.contains(&sequence))
            else {
                continue;
            };
            if !state.wants_decode() {
                continue;
            }
            if state.blocks.len() < self.cache.blocks_for(state.computed + 1) {
                match self.obtain_block(sequence, draft) {
                    Obtained::Block(block) => {
                        if let Some(state) = self.sequences.get_mut(&sequence) {
                            state.blocks.push(block);
                        }
                    }
                    Obtained::Stalled | Obtained::Preempted => {
                        draft.pressed = true;
                        continue;
                    }
                }
            }
            self.push_span(sequence, 1, draft);
        }
    }

    /// A block for `sequence`, at the cost of the newest sequence where none is free, be it itself. Decodes are planned
    /// oldest first, so a victim is never part of the draft.
    fn obtain_block(&mut self, sequence: SequenceId, draft: &mut Draft) -> Obtained {
        loop {
            if let Some(block) = self.pool.take() {
                return Obtained::Block(block);
            }
            if self.pool.quarantined() > draft.awaited {
                draft.awaited += 1;
                return Obtained::Stalled;
            }
            let newest = self.running.last().copied();
            let victim =
                newest.expect("the sequence that asks for a block runs, so it is a candidate itself");
            draft.pressed = true;
            self.preempt(victim);
            if victim == sequence {
                return Obtained::Preempted;
            }
        }
    }

    fn plan_prefills(&mut self, draft: &mut Draft) {
        let candidates: Vec<SequenceId> = self.running.iter().copied().collect();
        for sequence in candidates {
            self.push_chunk(sequence, draft);
        }
    }

    fn plan_admissions(&mut self, draft: &mut Draft) {
        while draft.budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(&sequence) = self.waiting.first() else { return };
            let Some(state) = self.sequences.get(&sequence) else { return };
            // Only the head of the queue is asked: a large request is not starved by small ones behind it.
            match self.admission(state) {
                Admission::Fits => self.start(sequence, draft),
                Admission::Wait | Admission::Never => return,
            }
        }
    }

    fn start(&mut self, sequence: SequenceId, draft: &mut Draft) {
        let Some(state) = self.sequences.get_mut(&sequence) else { return };
        let count = state.blocks_at_admission(&self.cache);
        state.prefill_target = state.tokens.len();
        state.blocks.extend(std::iter::from_fn(|| self.pool.take()).take(count));
        if !state.started {
            state.started = true;
            self.unstarted -= 1;
            self.counters.prompt_tokens += state.prompt_len as u64;
        }
        draft.begin.push(state.announcement());
        self.waiting.remove(&sequence);
        self.running.insert(sequence);
        // `begin` replaces whatever the shards still know of an earlier life.
        self.ending.remove(&sequence);
        self.push_chunk(sequence, draft);
    }

    fn push_chunk(&mut self, sequence: SequenceId, draft: &mut Draft) {
        let Some(state) = self.sequences.get(&sequence) else { return };
        let count = state.prefill_target.saturating_sub(state.computed).min(draft.budget);
        if count > 0 {
            self.push_span(sequence, count, draft);
        }
    }

    fn push_span(&mut self, sequence: SequenceId, count: usize, draft: &mut Draft) {
        let Some(state) = self.sequences.get_mut(&sequence) else { return };
        let (span, planned) = state.advance(count, self.next_step, &self.cache);
        draft.budget -= count;
        draft.run.push(span);
        draft.planned.push(planned);
    }
}
