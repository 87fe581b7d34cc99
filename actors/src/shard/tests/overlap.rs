//! Steps that are begun while another is computed.

use std::time::Duration;

use super::*;
use crate::shard::{
    Pipeline,
    beside::{Beside, Seen},
};

const PATIENCE: Duration = Duration::from_millis(1);

/// An executor whose model begins steps beside the host.
fn beside(comm: Box<dyn Collective>, seen: &Arc<Seen>) -> ModelExecutor {
    let ModelExecutor { model, kv, comm, .. } = executor(comm);
    ModelExecutor::new(Box::new(Beside::new(model, seen)), kv, comm)
}

fn alone_beside(seen: &Arc<Seen>) -> ModelExecutor {
    beside(Box::new(LocalGroup::new(1).remove(0)), seen)
}

fn pipeline(executor: &mut ModelExecutor) -> &mut dyn Pipeline {
    executor.pipeline().expect("the model can begin steps beside the host")
}

fn begun(executor: &mut ModelExecutor, plan: StepPlan) {
    pipeline(executor).begin(&Arc::new(plan)).unwrap();
}

/// The result of the oldest step.
fn finished(executor: &mut ModelExecutor) -> Result<StepResult, ShardError> {
    for _ in 0..1000 {
        if let Some(result) = pipeline(executor).finish(PATIENCE)? {
            return Ok(result);
        }
    }
    panic!("the step never ends");
}

fn decode(step: u64, sequences: std::ops::Range<u64>) -> StepPlan {
    let run = sequences.map(|sequence| span(sequence, Tokens::LastSampled, &[], Output::Sample));
    plan(step, vec![], run.collect())
}

fn prefill(step: u64, sequence: u64, first: u32, logprobs: Option<u32>) -> StepPlan {
    let run = vec![span(sequence, given(first..first + 3), &[sequence as u32], Output::Sample)];
    plan(step, vec![begin(sequence, logprobs)], run)
}

/// What follows `first..first + 3`, so many tokens.
fn expected(first: u32, tokens: usize) -> Vec<u32> {
    let mut history: Vec<u32> = (first..first + 3).collect();
    for _ in 0..tokens {
        history.push(draw(&history));
    }
    history.split_off(3)
}

#[test]
fn steps_that_are_begun_two_at_a_time_draw_what_they_draw_one_by_one() {
    let seen = Arc::default();
    let mut executor = alone_beside(&seen);
    assert_eq!(pipeline(&mut executor).depth(), 2);
    assert!(matches!(pipeline(&mut executor).finish(PATIENCE), Ok(None)));
    begun(&mut executor, prefill(0, 0, 0, None));
    begun(&mut executor, prefill(1, 1, 20, None));
    // A step that runs nothing takes its turn among the others.
    let (mut results, mut tokens) = (vec![finished(&mut executor).unwrap()], [Vec::new(), Vec::new()]);
    begun(&mut executor, plan(2, vec![], vec![]));
    results.push(finished(&mut executor).unwrap());
    for step in 3..9 {
        begun(&mut executor, decode(step, 0..2));
        results.push(finished(&mut executor).unwrap());
    }
    results.push(finished(&mut executor).unwrap());
    for (at, result) in results.iter().enumerate() {
        assert_eq!((result.step, result.transferred), (Step(at as u64), Some(Step(at as u64))));
        for output in &result.outputs {
            tokens[output.sequence.0 as usize].extend(output.sampled.iter().map(|sampled| sampled.token));
        }
    }
    assert_eq!(tokens, [expected(0, 7), expected(20, 7)]);
    assert!(executor.begun.is_empty());
    // Digests are those of steps one by one.
    let mut solo = alone();
    let plans = [prefill(0, 0, 0, None), prefill(1, 1, 20, None), plan(2, vec![], vec![])];
    for (result, plan) in results.iter().zip(plans.into_iter().chain((3..9).map(|step| decode(step, 0..2)))) {
        assert_eq!(*result, solo.execute(&plan).unwrap());
    }
    assert!(seen.beside.load(SeqCst) >= 5 && seen.named.load(SeqCst) >= 10);
}

#[test]
fn a_step_that_the_model_takes_in_one_go_waits_for_the_one_under_way_and_keeps_its_result() {
    let seen = Arc::default();
    let mut executor = alone_beside(&seen);
    begun(&mut executor, prefill(0, 0, 0, None));
    // It reports log-probabilities, and goes on with a token that the step under way draws.
    let mut second = decode(1, 0..1);
    let own = prefill(1, 1, 20, Some(2));
    second.begin = own.begin;
    second.run.extend(own.run);
    begun(&mut executor, second);
    let first = finished(&mut executor).unwrap();
    begun(&mut executor, decode(2, 0..1));
    let results = [first, finished(&mut executor).unwrap(), finished(&mut executor).unwrap()];
    let of = |sequence: u64| {
        let outputs = results.iter().flat_map(|result| &result.outputs);
        let own = outputs.filter(|output| output.sequence == SequenceId(sequence));
        own.flat_map(|output| output.sampled.iter().map(|sampled| sampled.token)).collect::<Vec<_>>()
    };
    assert_eq!((of(0), of(1)), (expected(0, 3), expected(20, 1)));
    assert!(results[1].outputs[1].sampled[0].logprobs.is_some());
    assert_eq!(seen.at_once.load(SeqCst), 1);
}

#[test]
fn a_sequence_that_ends_or_begins_anew_with_a_step_under_way_leaves_its_token_to_that_step() {
    let mut executor = alone_beside(&Arc::default());
    begun(&mut executor, prefill(0, 0, 0, None));
    // As after a preemption: the same sequence in another page, from its first token.
    let mut again = prefill(1, 0, 0, None);
    again.run[0].new_blocks = vec![BlockId(5)];
    begun(&mut executor, again);
    let first = finished(&mut executor).unwrap();
    let mut last = decode(2, 0..1);
    last.end = vec![SequenceId(0)];
    begun(&mut executor, last);
    let rest = [finished(&mut executor).unwrap(), finished(&mut executor).unwrap()];
    let tokens: Vec<u32> = [&first, &rest[0], &rest[1]].into_iter().flat_map(sampled).collect();
    let expected = expected(0, 2);
    assert_eq!(tokens, [expected[0], expected[0], expected[1]]);
    assert!(executor.sequences.is_empty());
}

fn is_aborted(result: &Result<(), ShardError>) -> bool {
    matches!(result, Err(ShardError::Aborted { reason }) if reason == "a peer is gone")
}

#[test]
fn an_abort_ends_both_steps_under_way_and_the_next_epoch_begins_from_nothing() {
    let comm = LocalGroup::new(1).remove(0);
    let abort = comm.abort_handle();
    let mut executor = beside(Box::new(comm), &Arc::default());
    begun(&mut executor, prefill(0, 0, 0, None));
    begun(&mut executor, decode(1, 0..1));
    abort.abort("a peer is gone");
    assert!(is_aborted(&finished(&mut executor).map(drop)));
    assert!(executor.begun.is_empty());
    assert!(is_aborted(&pipeline(&mut executor).finish(PATIENCE).map(drop)));
    assert!(is_aborted(&pipeline(&mut executor).begin(&Arc::new(decode(2, 0..1)))));
    executor.rejoin(Epoch(5), Box::new(LocalGroup::new(1).remove(0))).unwrap();
    let in_epoch = |plan| StepPlan { epoch: Epoch(5), ..plan };
    begun(&mut executor, in_epoch(prefill(0, 3, 30, None)));
    begun(&mut executor, in_epoch(decode(1, 3..4)));
    let tokens = [finished(&mut executor).unwrap(), finished(&mut executor).unwrap()];
    assert_eq!(tokens.iter().flat_map(sampled).collect::<Vec<_>>(), expected(30, 2));
}

#[test]
fn a_new_epoch_forgets_steps_that_are_under_way() {
    let mut executor = alone_beside(&Arc::default());
    begun(&mut executor, prefill(0, 0, 0, None));
    begun(&mut executor, decode(1, 0..1));
    executor.rejoin(Epoch(5), Box::new(LocalGroup::new(1).remove(0))).unwrap();
    assert!(matches!(pipeline(&mut executor).finish(PATIENCE), Ok(None)));
    begun(&mut executor, StepPlan { epoch: Epoch(5), ..prefill(0, 3, 30, None) });
    assert_eq!(sampled(&finished(&mut executor).unwrap()), expected(30, 1));
}

#[test]
fn an_error_with_two_steps_under_way_leaves_none() {
    let seen = Arc::<Seen>::default();
    let mut executor = alone_beside(&seen);
    begun(&mut executor, prefill(0, 0, 0, None));
    begun(&mut executor, decode(1, 0..1));
    seen.faults.store(1, SeqCst);
    let error = finished(&mut executor).unwrap_err();
    assert!(matches!(error, ShardError::Model { step: Step(0), .. }), "{error}");
    assert!(executor.begun.is_empty());
    // A plan that is wrong likewise.
    let mut executor = alone_beside(&seen);
    begun(&mut executor, prefill(0, 0, 0, None));
    let refused = pipeline(&mut executor).begin(&Arc::new(decode(1, 7..8))).unwrap_err();
    assert!(refused.to_string().contains("never begun"), "{refused}");
    assert!(executor.begun.is_empty());
}

#[test]
fn steps_go_one_by_one_where_overlap_is_off_or_the_model_has_none() {
    let mut off = alone_beside(&Arc::default()).with_overlap(false);
    assert!(off.pipeline().is_none() && alone().pipeline().is_none());
    assert_eq!(sampled(&off.execute(&prefill(0, 0, 0, None)).unwrap()), expected(0, 1));
    assert_eq!(sampled(&off.execute(&decode(1, 0..1)).unwrap()), expected(0, 2)[1..]);
}

/// Runs requests over one scheduler and one executor with two steps under way as often as there are two.
fn run_beside(requests: &[Request], seen: &Arc<Seen>) -> (Vec<Vec<u32>>, u64) {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 24,
        max_model_len: 128,
        max_waiting_requests: 16,
        priority_aging_ms: 1000,
    };
    let mut scheduler = Scheduler::new(config, CacheSpec::new(BLOCK, BLOCKS), VOCAB, Epoch(4));
    let mut executor = alone_beside(seen);
    for (id, request) in requests.iter().enumerate() {
        scheduler.submit(0, SequenceId(id as u64), request.clone(), None).unwrap();
    }
    let (mut under_way, mut outputs) = (0, vec![Vec::new(); requests.len()]);
    while !scheduler.is_idle() {
        while under_way < 2 {
            let Some(plan) = scheduler.plan() else { break };
            begun(&mut executor, plan);
            under_way += 1;
        }
        under_way -= 1;
        for event in scheduler.absorb(finished(&mut executor).unwrap()).unwrap() {
            scheduler.check_invariants();
            if let GenerationEvent::Token(sampled) = event.event {
                outputs[event.sequence.0 as usize].push(sampled.token);
            }
        }
    }
    (outputs, scheduler.counters().preemptions)
}

#[test]
fn preempted_penalised_and_waiting_sequences_draw_beside_each_other_what_they_draw_alone() {
    let some = |id: usize, prompt| {
        // Penalties, or none; tokens that are awaited, or not; log-probabilities of few.
        let mut request = demanding(id as u64, prompt);
        if !id.is_multiple_of(3) {
            request.sampling.adjustments = Adjustments::default();
        }
        (request.awaits_tokens, request.logprobs) = (id % 4 == 1, (id == 6).then_some(1));
        request
    };
    let requests: Vec<Request> =
        prompts().into_iter().enumerate().map(|(id, prompt)| some(id, prompt)).collect();
    let expected: Vec<Vec<u32>> = requests.iter().map(solo).collect();
    let seen = Arc::<Seen>::default();
    let (outputs, preemptions) = run_beside(&requests, &seen);
    assert_eq!(outputs, expected);
    assert!(preemptions > 0, "the pool is meant to be too small");
    let [beside, named, at_once] = [&seen.beside, &seen.named, &seen.at_once].map(|count| count.load(SeqCst));
    println!("{beside} steps beside others, {named} tokens named, {at_once} steps at once");
    assert!(beside > 20 && named > 20 && at_once > 0);
}
