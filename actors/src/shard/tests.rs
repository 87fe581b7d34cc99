//! The real executor over a model that is a pure function of the tokens in its pages.

mod overlap;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use consort_kernels::{
    DType,
    device::Device,
    kv_append::PageShape,
    sampling::{Adjustments, SamplingParams, log_probabilities, sample},
};
use consort_parallel::{
    batch::Batch,
    collective::{Collective, LocalGroup},
    ids::BlockId,
    kv::{KvLayout, KvStore},
    model::{DrawOnHost, HostModel, ModelError},
};

use super::{ModelExecutor, Rejoined, ShardExecutor};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    error::ShardError,
    ids::{Epoch, SequenceId, Step},
    plan::{BlockCopy, CachedTokens, NewSequence, Output, Span, StepPlan, StepResult, Tokens},
    request::{FinishReason, GenerationError, GenerationEvent, Request},
    scheduler::Scheduler,
};

const VOCAB: usize = 50;
const BLOCK: usize = 16;
const BLOCKS: usize = 8;
const LOGIT_ROWS_MAX: usize = 3;

/// Keeps tokens by page, and computes logits from the history that a block table names. Every life of its group begins
/// with a meeting, and nothing may come before.
#[derive(Default)]
struct TableModel {
    met: bool,
    joins: Arc<AtomicUsize>,
    pages: BTreeMap<(BlockId, usize), u32>,
    histories: Vec<Vec<u32>>,
    logits: Vec<f32>,
}

/// A sequence that begins with this token breaks the model down, as with overflowing activations.
const POISON: u32 = VOCAB as u32 - 1;

fn logits_after(history: &[u32]) -> Vec<f32> {
    if history.first() == Some(&POISON) {
        return vec![f32::NAN; VOCAB];
    }
    let hash = history
        .iter()
        .fold(7u64, |hash, &token| hash.wrapping_mul(6364136223846793005) + u64::from(token) + 1);
    let hash = (hash ^ (hash >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8;
    (0..VOCAB as u64).map(|id| ((hash ^ id.wrapping_mul(0x9e37_79b9)) % 1009) as f32 / 200.0).collect()
}

impl HostModel for TableModel {
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        self.met = false;
        let rank = comm.rank().0;
        let peers = comm.exchange(&rank.to_le_bytes())?;
        assert_eq!(peers, (0..comm.size() as u16).map(|rank| rank.to_le_bytes()).collect::<Vec<_>>());
        self.joins.fetch_add(1, SeqCst);
        self.met = true;
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &Batch,
        _kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        assert!(self.met);
        comm.barrier()?;
        self.histories.clear();
        let wanted = |row: usize| batch.output_rows.contains(&row);
        for span in &batch.spans {
            let table = &batch.tables[0][span.table.clone()];
            assert_eq!(table.len(), span.context_len.div_ceil(BLOCK), "the table covers the context exactly");
            assert_eq!(batch.positions[span.rows.end - 1] as usize + 1, span.context_len);
            for row in span.rows.clone() {
                let position = batch.positions[row] as usize;
                self.pages.insert((table[position / BLOCK], position % BLOCK), batch.tokens[row]);
                if wanted(row) {
                    let at = |at: usize| self.pages[&(table[at / BLOCK], at % BLOCK)];
                    self.histories.push((0..=position).map(at).collect());
                }
            }
        }
        assert_eq!(self.histories.len(), batch.output_rows.len());
        Ok(())
    }

    fn logits(
        &mut self,
        rows: std::ops::Range<usize>,
        comm: &mut dyn Collective,
    ) -> Result<&mut [f32], ModelError> {
        comm.barrier()?;
        assert!(!rows.is_empty() && rows.len() <= LOGIT_ROWS_MAX, "{rows:?}");
        self.logits = self.histories[rows].iter().flat_map(|history| logits_after(history)).collect();
        Ok(&mut self.logits)
    }

    fn logit_rows_max(&self) -> usize {
        LOGIT_ROWS_MAX
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn weight_bytes(&self) -> u64 {
        123
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }
}

fn executor(comm: Box<dyn Collective>) -> ModelExecutor {
    counted(comm, &Arc::default())
}

/// An executor whose model counts the meetings that it came to.
fn counted(comm: Box<dyn Collective>, joins: &Arc<AtomicUsize>) -> ModelExecutor {
    let layout = KvLayout {
        pages: PageShape::new(BLOCK, 1, 4).unwrap(),
        layers_per_page: 1,
        groups: 1,
        dtype: DType::F32,
    };
    let kv = KvStore::new(&Device::cpu(1).unwrap(), layout, BLOCKS).unwrap();
    let model = TableModel { joins: Arc::clone(joins), ..TableModel::default() };
    ModelExecutor::new(Box::new(DrawOnHost::new(model)), kv, comm)
}

fn alone() -> ModelExecutor {
    executor(Box::new(LocalGroup::new(1).remove(0)))
}

fn sampling() -> SamplingParams {
    SamplingParams { seed: 11, ..SamplingParams::default() }
}

fn begin(sequence: u64, logprobs: Option<u32>) -> NewSequence {
    NewSequence { sequence: SequenceId(sequence), prompt_len: 0, sampling: sampling(), logprobs }
}

fn span(sequence: u64, tokens: Tokens, new_blocks: &[u32], output: Output) -> Span {
    let new_blocks = new_blocks.iter().copied().map(BlockId).collect();
    Span { sequence: SequenceId(sequence), cached: CachedTokens::default(), tokens, new_blocks, output }
}

fn given(tokens: std::ops::Range<u32>) -> Tokens {
    Tokens::Given(tokens.collect())
}

fn plan(step: u64, begin: Vec<NewSequence>, run: Vec<Span>) -> StepPlan {
    StepPlan {
        epoch: Epoch(4),
        step: Step(step),
        begin,
        run,
        copies: Vec::new(),
        saves: Vec::new(),
        loads: Vec::new(),
        await_transfers: false,
        end: Vec::new(),
    }
}

fn draw(history: &[u32]) -> u32 {
    sample(&mut logits_after(history), &sampling(), history.len() as u64).unwrap()
}

fn sampled(result: &StepResult) -> Vec<u32> {
    result.outputs.iter().flat_map(|output| output.sampled.iter().map(|sampled| sampled.token)).collect()
}

#[test]
fn chunks_and_decodes_draw_what_the_whole_history_draws() {
    let mut executor = alone();
    let first = plan(0, vec![begin(0, None)], vec![span(0, given(0..10), &[5], Output::Nothing)]);
    assert_eq!(executor.execute(&first).unwrap().outputs, []);
    let mut history: Vec<u32> = (0..20).collect();
    // A second sequence joins in the same step, with a page of its own.
    let run =
        vec![span(0, given(10..20), &[2], Output::Sample), span(1, given(30..33), &[7], Output::Sample)];
    let result = executor.execute(&plan(1, vec![begin(1, None)], run)).unwrap();
    history.push(draw(&history));
    assert_eq!(sampled(&result), [history[20], draw(&[30, 31, 32])]);
    let result =
        executor.execute(&plan(2, vec![], vec![span(0, Tokens::LastSampled, &[], Output::Sample)])).unwrap();
    assert_eq!(sampled(&result), [draw(&history)]);
}

#[test]
fn log_probabilities_are_of_raw_logits() {
    let mut executor = alone();
    let run = vec![span(0, given(0..4), &[0], Output::Sample)];
    let result = executor.execute(&plan(0, vec![begin(0, Some(3))], run)).unwrap();
    let drawn = &result.outputs[0].sampled[0];
    let logits = logits_after(&[0, 1, 2, 3]);
    let (logprob, top) = log_probabilities(&logits, drawn.token, 3);
    let reported = drawn.logprobs.as_ref().unwrap();
    assert_eq!((reported.token, reported.logprob, &reported.top), (drawn.token, logprob, &top));
}

#[test]
fn a_sequence_whose_logits_are_not_numbers_ends_with_an_error_and_its_neighbour_goes_on() {
    let mut executor = alone();
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 64,
        max_waiting_requests: 4,
        priority_aging_ms: 1000,
    };
    let cache = CacheSpec::new(BLOCK, BLOCKS);
    let mut scheduler = Scheduler::new(config, cache, VOCAB, Epoch(4));
    let request = |prompt: Vec<u32>| Request {
        prompt,
        sampling: sampling(),
        max_tokens: 3,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    };
    scheduler.submit(0, SequenceId(0), request(vec![POISON, 1]), None).unwrap();
    scheduler.submit(0, SequenceId(1), request(vec![1, 2]), None).unwrap();
    let mut events = Vec::new();
    // Two steps ahead, so that the broken sequence is also planned once too often.
    let (mut first, mut second) = (scheduler.plan(), scheduler.plan());
    while let Some(plan) = first {
        events.extend(scheduler.absorb(executor.execute(&plan).unwrap()).unwrap());
        (first, second) = (second, scheduler.plan());
    }
    let of = |sequence: u64| -> Vec<GenerationEvent> {
        let own = events.iter().filter(|event| event.sequence == SequenceId(sequence));
        own.map(|event| event.event.clone()).collect()
    };
    assert_eq!(of(0), [GenerationEvent::Failed(GenerationError::NotFinite { position: 2 })]);
    assert_eq!(of(1).len(), 5);
    assert_eq!(of(1)[0], GenerationEvent::Prefilled { cached_tokens: 0 });
    assert_eq!(of(1)[4], GenerationEvent::Finished(FinishReason::Length));
    assert!(scheduler.is_idle() && scheduler.used_blocks() == 0);
}

#[test]
fn prompt_log_probabilities_go_on_over_chunks_and_logit_groups() {
    let mut executor = alone();
    let first = Output::PromptLogprobs { top: 1, next: Some(7), sample: false };
    let last = Output::PromptLogprobs { top: 1, next: None, sample: true };
    let plans = [
        plan(0, vec![begin(0, None)], vec![span(0, given(0..7), &[0], first)]),
        plan(1, vec![], vec![span(0, given(7..12), &[], last)]),
    ];
    let results = plans.map(|plan| executor.execute(&plan).unwrap());
    let reported: Vec<(u32, f32)> = results
        .iter()
        .flat_map(|result| result.outputs[0].prompt_logprobs.iter().map(|entry| (entry.token, entry.logprob)))
        .collect();
    let history: Vec<u32> = (0..12).collect();
    let expected: Vec<(u32, f32)> = (1..12u32)
        .map(|token| (token, log_probabilities(&logits_after(&history[..token as usize]), token, 1).0))
        .collect();
    assert_eq!(reported, expected);
    assert_eq!(sampled(&results[1]), [draw(&history)]);
}

#[test]
fn a_sequence_that_begins_again_draws_the_same_token_from_other_pages() {
    let mut executor = alone();
    let run = vec![span(0, given(0..5), &[0], Output::Sample)];
    let first = executor.execute(&plan(0, vec![begin(0, None)], run)).unwrap();
    let token = sampled(&first)[0];
    let mut ended = plan(1, vec![], vec![span(0, Tokens::LastSampled, &[], Output::Sample)]);
    ended.end = vec![SequenceId(0)];
    let second = sampled(&executor.execute(&ended).unwrap());
    let replay = Tokens::Given(vec![0, 1, 2, 3, 4, token]);
    let again = plan(2, vec![begin(0, None)], vec![span(0, replay, &[6], Output::Sample)]);
    assert_eq!(sampled(&executor.execute(&again).unwrap()), second);
}

#[test]
fn plans_made_ahead_of_an_aborted_step_are_aborted_too_until_the_next_epoch() {
    let mut group = LocalGroup::new(2);
    let (peer, own) = (group.remove(1), group.remove(0));
    let mut executor = executor(Box::new(own));
    drop(peer);
    let first = plan(0, vec![begin(0, None)], vec![span(0, given(0..5), &[0], Output::Sample)]);
    let ahead = plan(1, vec![], vec![span(0, Tokens::LastSampled, &[], Output::Sample)]);
    for plan in [first, ahead] {
        let result = executor.execute(&plan);
        assert!(matches!(&result, Err(ShardError::Aborted { .. })), "{result:?}");
    }
    executor.rejoin(Epoch(5), Box::new(LocalGroup::new(1).remove(0))).unwrap();
    let mut again = plan(0, vec![begin(0, None)], vec![span(0, given(0..5), &[0], Output::Sample)]);
    again.epoch = Epoch(5);
    assert_eq!(sampled(&executor.execute(&again).unwrap()), [draw(&[0, 1, 2, 3, 4])]);
}

#[test]
fn a_model_joins_once_in_each_life_of_its_group() {
    let joins = Arc::new(AtomicUsize::new(0));
    let solo = || Box::new(LocalGroup::new(1).remove(0));
    let mut executor = counted(solo(), &joins);
    assert_eq!(joins.load(SeqCst), 0, "building needs no peers");
    executor.join().unwrap();
    executor.join().unwrap();
    executor
        .execute(&plan(0, vec![begin(0, None)], vec![span(0, given(0..2), &[0], Output::Sample)]))
        .unwrap();
    assert_eq!(joins.load(SeqCst), 1);
    executor.rejoin(Epoch(5), solo()).unwrap();
    executor.join().unwrap();
    assert_eq!(joins.load(SeqCst), 2);
    // Whoever drives an executor without joining gets the same with its first step.
    executor.rejoin(Epoch(6), solo()).unwrap();
    executor.execute(&StepPlan { epoch: Epoch(6), ..plan(0, vec![], vec![]) }).unwrap();
    executor.execute(&StepPlan { epoch: Epoch(6), ..plan(1, vec![], vec![]) }).unwrap();
    assert_eq!(joins.load(SeqCst), 3);
}

#[test]
fn a_rank_whose_group_is_aborted_while_it_joins_is_sound_and_joins_the_next() {
    let joins = Arc::new(AtomicUsize::new(0));
    let mut group = LocalGroup::new(2);
    let (peer, own) = (group.remove(1), group.remove(0));
    let mut executor = counted(Box::new(own), &joins);
    let (joined, executed) = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(peer);
        });
        (executor.join(), executor.execute(&plan(0, vec![], vec![])))
    });
    for result in [joined, executed.map(drop)] {
        assert!(
            matches!(&result, Err(ShardError::Aborted { reason }) if reason == "rank 1 left the group"),
            "{result:?}"
        );
    }
    assert_eq!(joins.load(SeqCst), 0);
    executor.rejoin(Epoch(5), Box::new(LocalGroup::new(1).remove(0))).unwrap();
    executor.join().unwrap();
    let mut again = plan(0, vec![begin(0, None)], vec![span(0, given(0..5), &[0], Output::Sample)]);
    again.epoch = Epoch(5);
    assert_eq!(sampled(&executor.execute(&again).unwrap()), [draw(&[0, 1, 2, 3, 4])]);
}

#[test]
fn a_model_that_cannot_join_fails_its_rank() {
    let mut group = LocalGroup::new(2);
    let mut peer = group.remove(1);
    let mut executor = executor(Box::new(group.remove(0)));
    std::thread::scope(|scope| {
        scope.spawn(move || peer.barrier().unwrap_err());
        let error = executor.join().unwrap_err();
        assert!(matches!(error, ShardError::Join { .. }), "{error}");
    });
}

#[test]
fn only_rank_0_reports_and_all_ranks_agree() {
    let threads: Vec<_> = LocalGroup::new(3)
        .into_iter()
        .map(|comm| {
            std::thread::spawn(move || {
                let mut executor = executor(Box::new(comm));
                let run = vec![span(0, given(0..5), &[0], Output::Sample)];
                executor.execute(&plan(0, vec![begin(0, Some(1))], run)).unwrap()
            })
        })
        .collect();
    let results: Vec<StepResult> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(results.iter().map(|result| result.outputs.len()).collect::<Vec<_>>(), [1, 0, 0]);
    assert!(results.iter().all(|result| result.digest == results[0].digest));
}

#[test]
fn digests_tell_different_tokens_apart() {
    let digest_of = |last: u32| {
        let run = vec![span(0, Tokens::Given(vec![1, last]), &[0], Output::Sample)];
        let result = alone().execute(&plan(0, vec![begin(0, None)], run)).unwrap();
        (sampled(&result)[0], result.digest)
    };
    let (first, other) =
        (digest_of(2), (3..40).map(digest_of).find(|(token, _)| *token != digest_of(2).0).unwrap());
    assert_ne!(first.1, other.1);
    assert_eq!(digest_of(2), first);
}

#[test]
fn plans_out_of_turn_are_refused() {
    let step = |epoch, step| StepPlan { epoch: Epoch(epoch), ..plan(step, vec![], vec![]) };
    assert!(matches!(
        alone().execute(&step(4, 1)),
        Err(ShardError::WrongStep { got: Step(1), expected: Step(0) })
    ));
    let mut executor = alone();
    executor.execute(&step(4, 0)).unwrap();
    assert!(matches!(executor.execute(&step(4, 0)), Err(ShardError::WrongStep { .. })));
    assert!(matches!(executor.execute(&step(5, 1)), Err(ShardError::WrongEpoch { .. })));
    let comm = Box::new(LocalGroup::new(1).remove(0));
    assert!(matches!(executor.rejoin(Epoch(5), comm), Ok(Rejoined::Kept)));
    assert!(matches!(executor.execute(&step(4, 1)), Err(ShardError::WrongEpoch { .. })));
    executor.execute(&step(5, 0)).unwrap();
}

#[test]
fn plans_that_leave_the_pages_are_refused() {
    let begun = vec![begin(0, None)];
    let cases = [
        (vec![], span(0, given(0..2), &[0], Output::Sample), "never begun"),
        (begun.clone(), span(0, Tokens::LastSampled, &[0], Output::Sample), "no token yet"),
        (begun.clone(), span(0, given(0..0), &[], Output::Nothing), "no tokens"),
        (begun.clone(), span(0, given(0..17), &[0], Output::Nothing), "1 pages of 16 tokens for 17 tokens"),
        (begun, span(0, given(0..2), &[8], Output::Nothing), "block 8 does not exist"),
    ];
    for (begin, span, message) in cases {
        let error = alone().execute(&plan(0, begin, vec![span])).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let mut copying = plan(0, vec![], vec![]);
    copying.copies = vec![BlockCopy { from: BlockId(0), to: BlockId(99) }];
    assert!(matches!(alone().execute(&copying), Err(ShardError::Model { .. })));
}

#[test]
fn an_aborted_collective_is_not_the_rank_s_fault() {
    let mut members = LocalGroup::new(2);
    let comm = members.remove(0);
    comm.abort_handle().abort("rank 1 is gone");
    let run = vec![span(0, given(0..2), &[0], Output::Sample)];
    let error = executor(Box::new(comm)).execute(&plan(0, vec![begin(0, None)], run)).unwrap_err();
    assert!(matches!(&error, ShardError::Aborted { reason } if reason == "rank 1 is gone"), "{error}");
}

/// A request whose draws depend on everything that a request can change, or on nothing of it.
fn demanding(id: u64, prompt: Vec<u32>) -> Request {
    let some = !id.is_multiple_of(4);
    let adjustments = Adjustments {
        min_tokens: (id * 5 % 40) as u32,
        masked_until_min: vec![3, 4],
        logit_bias: vec![(id as u32 % 20, 3.0), (5, -100.0)],
        repetition_penalty: 0.8 + id as f32 / 8.0,
        frequency_penalty: id as f32 / 6.0 - 1.0,
        presence_penalty: 1.0 - id as f32 / 9.0,
    };
    Request {
        prompt,
        sampling: SamplingParams {
            temperature: if id.is_multiple_of(3) { 0.0 } else { 0.9 },
            adjustments: if some { adjustments } else { Adjustments::default() },
            ..sampling()
        },
        max_tokens: 50,
        stop_token_ids: vec![3, 4],
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

fn prompts() -> Vec<Vec<u32>> {
    (0..16u32).map(|id| (0..3 + id * 3).map(|at| (at * 7 + id) % (VOCAB as u32 - 1)).collect()).collect()
}

/// What `request` must yield: a token at a time, each row changed by the plain definition.
fn solo(request: &Request) -> Vec<u32> {
    let Adjustments { min_tokens, masked_until_min, logit_bias, .. } = &request.sampling.adjustments;
    let penalties = &request.sampling.adjustments;
    let mut history = request.prompt.clone();
    let output = |history: &[u32]| history[request.prompt.len()..].to_vec();
    while output(&history).len() < request.max_tokens {
        let so_far = output(&history);
        let mut row = logits_after(&history);
        for (token, logit) in row.iter_mut().enumerate() {
            let token = token as u32;
            if so_far.len() < *min_tokens as usize && masked_until_min.contains(&token) {
                *logit = f32::NEG_INFINITY;
            }
            logit_bias.iter().filter(|(biased, _)| *biased == token).for_each(|(_, bias)| *logit += bias);
            if history.contains(&token) {
                let penalty = penalties.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            let count = so_far.iter().filter(|&&seen| seen == token).count();
            if count > 0 {
                *logit -= penalties.frequency_penalty * count as f32;
                *logit -= penalties.presence_penalty;
            }
        }
        let token = sample(&mut row, &request.sampling, history.len() as u64).unwrap();
        history.push(token);
        if request.stop_token_ids.contains(&token) {
            break;
        }
    }
    output(&history)
}

/// Runs requests over one scheduler and one executor, at most `depth` steps ahead. Preemptions come with the tokens.
fn run_together(requests: &[Request], depth: usize, num_blocks: usize) -> (Vec<Vec<u32>>, u64) {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 24,
        max_model_len: 128,
        max_waiting_requests: 16,
        priority_aging_ms: 1000,
    };
    let cache = CacheSpec::new(BLOCK, num_blocks);
    let mut scheduler = Scheduler::new(config, cache, VOCAB, Epoch(4));
    let mut executor = alone();
    for (id, request) in requests.iter().enumerate() {
        scheduler.submit(0, SequenceId(id as u64), request.clone(), None).unwrap();
    }
    let (mut results, mut outputs) = (std::collections::VecDeque::new(), vec![Vec::new(); requests.len()]);
    while !scheduler.is_idle() {
        while results.len() < depth {
            let Some(plan) = scheduler.plan() else { break };
            results.push_back(executor.execute(&plan).unwrap());
        }
        for event in scheduler.absorb(results.pop_front().expect("progress")).unwrap() {
            scheduler.check_invariants();
            match event.event {
                GenerationEvent::Token(sampled) => outputs[event.sequence.0 as usize].push(sampled.token),
                GenerationEvent::Finished(_) | GenerationEvent::Prefilled { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    (outputs, scheduler.counters().preemptions)
}

#[test]
fn preempted_sequences_draw_what_they_draw_alone_whatever_changes_their_logits() {
    let requests: Vec<Request> =
        prompts().into_iter().enumerate().map(|(id, prompt)| demanding(id as u64, prompt)).collect();
    let expected: Vec<Vec<u32>> = requests.iter().map(solo).collect();
    let plain = |request: &Request| {
        solo(&Request {
            sampling: SamplingParams { adjustments: Adjustments::default(), ..sampling() },
            ..request.clone()
        })
    };
    let changed =
        requests.iter().zip(&expected).filter(|(request, tokens)| plain(request) != **tokens).count();
    assert!(changed > 10, "the penalties are meant to matter, and did for {changed}");
    for depth in [1, 2] {
        let (outputs, preemptions) = run_together(&requests, depth, BLOCKS);
        assert_eq!(outputs, expected, "depth {depth}");
        assert!(preemptions > 0, "the pool is meant to be too small");
    }
}

#[test]
fn a_request_with_penalties_draws_the_same_among_fifteen_others_as_alone() {
    let prompts = prompts();
    let mut requests: Vec<Request> =
        prompts.iter().enumerate().map(|(id, prompt)| demanding(id as u64 + 1, prompt.clone())).collect();
    for own in [0, 6, 15] {
        let (alone, _) = run_together(&requests[own..=own], 2, BLOCKS);
        let (together, _) = run_together(&requests, 2, BLOCKS);
        assert_eq!(together[own], alone[0]);
        // In other company, and at another place of the batch.
        requests.rotate_left(5);
        let (elsewhere, _) = run_together(&requests, 2, BLOCKS);
        assert_eq!(elsewhere[(own + 11) % 16], alone[0]);
        requests.rotate_right(5);
    }
}

#[test]
fn no_stop_token_is_drawn_before_the_minimum() {
    let mut at_minimum = 0;
    for id in 0..24 {
        let mut request = demanding(1, vec![id, id + 1]);
        request.sampling = SamplingParams { seed: u64::from(id), ..sampling() };
        request.sampling.adjustments = Adjustments {
            min_tokens: 6,
            masked_until_min: vec![3, 4],
            logit_bias: vec![(3, 9.0)],
            ..Default::default()
        };
        let (outputs, _) = run_together(&[request], 2, BLOCKS);
        let stopped = outputs[0].iter().position(|token| [3, 4].contains(token));
        assert!(stopped.is_none_or(|at| at >= 6), "{outputs:?}");
        at_minimum += usize::from(stopped == Some(6));
    }
    assert!(at_minimum > 12, "the bias makes an end likely as soon as it is allowed: {at_minimum}");
}

#[test]
fn log_probabilities_are_of_the_logits_before_any_change() {
    let mut executor = alone();
    let mut new = begin(0, Some(3));
    new.sampling.adjustments = Adjustments { logit_bias: vec![(9, 100.0)], ..Default::default() };
    let run = vec![span(0, given(0..4), &[0], Output::Sample)];
    let result = executor.execute(&plan(0, vec![new], run)).unwrap();
    let drawn = &result.outputs[0].sampled[0];
    let (logprob, top) = log_probabilities(&logits_after(&[0, 1, 2, 3]), 9, 3);
    let reported = drawn.logprobs.as_ref().unwrap();
    assert_eq!((drawn.token, reported.logprob, &reported.top), (9, logprob, &top));
}
