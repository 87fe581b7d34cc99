//! Who gets pages and who gives way, in situations that whole runs seldom meet.

use consort_kernels::sampling::SamplingParams;

use super::*;
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{Epoch, SequenceId},
    request::Request,
    scheduler::{
        PREEMPTIONS_MAX,
        simulation::{SimShard, VOCAB},
    },
};

fn request(prompt_len: usize) -> Request {
    Request {
        prompt: (0..prompt_len as u32).collect(),
        sampling: SamplingParams::default(),
        max_tokens: 4,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

/// Sequences with one full page each, which are about to need their second.
fn decoding(sequences: [u64; 2], num_blocks: usize) -> Scheduler {
    let cache = CacheSpec { prefix_caching: false, ..CacheSpec::new(4, num_blocks) };
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        max_model_len: 64,
        max_waiting_requests: 4,
        priority_aging_ms: 1000,
    };
    let mut scheduler = Scheduler::new(config, cache, VOCAB, Epoch(0));
    for id in sequences {
        scheduler.submit(0, SequenceId(id), request(4), None).expect("it fits");
    }
    let plan = scheduler.plan().expect("both can run");
    scheduler.absorb(SimShard::new(cache, Epoch(0)).execute_at_once(&plan)).expect("it answers the plan");
    assert_eq!(scheduler.running(), 2);
    scheduler
}

#[test]
fn whoever_gives_way_claims_no_page_any_more() {
    let mut scheduler = decoding([0, 1], 4);
    let [kept, other] = [0, 1].map(|id| scheduler.sequences.find(SequenceId(id)).expect("it runs"));
    // One page is somebody else's, and one is on its way.
    let on_its_way = [scheduler.pool.take(0), scheduler.pool.take(0)][1].expect("two are left");
    scheduler.pool.release(on_its_way, Some(Step(9)));
    scheduler.sequences[kept].preemptions = PREEMPTIONS_MAX;
    for running in &mut scheduler.running {
        running.order = scheduler.sequences[running.slot].order();
    }
    let mut draft = Draft::default();
    assert_eq!(scheduler.obtain_block(other, &mut draft), Obtained::Stalled);
    assert_eq!(draft.claimants, [other]);
    // The page it waits for turns out to be somebody's prefix.
    scheduler.pool.share(on_its_way);
    assert_eq!(scheduler.obtain_block(kept, &mut draft), Obtained::Pages);
    assert_eq!((scheduler.sequences[other].life, draft.claimants.len()), (0, 0));
}

#[test]
fn nobody_gives_way_for_the_second_page_of_a_chunk() {
    let mut scheduler = decoding([0, 2], 16);
    let [first, last] = [0, 2].map(|id| scheduler.sequences.find(SequenceId(id)).expect("it runs"));
    scheduler.submit(0, SequenceId(1), request(8), None).expect("it fits");
    let mut draft = Draft { budget: 8, ..Draft::default() };
    let shares = scheduler.share_out(&mut draft);
    assert_eq!(shares.iter().map(|share| share.count).collect::<Vec<_>>(), [8]);
    // Two pages are left, and one of them is claimed.
    while scheduler.pool.available() > 2 {
        scheduler.pool.take(0);
    }
    draft.claimants.push(first);
    shares.into_iter().for_each(|share| scheduler.plan_chunk(share, &mut draft));
    assert_eq!(draft.planned.iter().map(|span| span.end - span.start).collect::<Vec<_>>(), [4]);
    assert!(scheduler.sequences[last].life > 0 && scheduler.counters().preemptions == 0);
}

#[test]
fn a_step_waits_for_transfers_if_somebody_lacks_a_page_for_their_sake() {
    for is_short in [false, true] {
        let mut scheduler = decoding([0, 1], 4);
        let [one, other] = [0, 1].map(|_| scheduler.pool.take(0).expect("two are left"));
        scheduler.pool.begin_transfer(one);
        [one, other].into_iter().for_each(|page| scheduler.pool.release(page, None));
        if !is_short {
            scheduler.pool.end_transfer(one);
        }
        assert_eq!(scheduler.pool.moving(), usize::from(is_short));
        let plan = scheduler.plan().expect("one can decode");
        assert_eq!((plan.run.len(), plan.await_transfers), if is_short { (1, true) } else { (2, false) });
    }
}
