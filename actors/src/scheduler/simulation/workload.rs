//! Scenarios from a seed: pools from one sequence's need to ample, budgets from tiny to large, every arrangement of
//! layer groups, arrivals one by one, in bursts and all at once, and users of every kind.

use consort_kernels::sampling::SamplingParams;

use super::{
    Random, STOP, VOCAB,
    cost::{CostModel, Load},
    mix,
    model::{draw, history_of, link, salt},
    rig::Ask,
    scenario::{Action, Scenario, Setup},
};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    request::Request,
};

/// Windows of layer groups.
const ARRANGEMENTS: [&[Option<usize>]; 8] = [
    &[None],
    &[None],
    &[None, Some(9)],
    &[Some(8), None],
    &[Some(6)],
    &[Some(1), None, Some(17)],
    &[None, None],
    &[Some(5), Some(12)],
];

/// The same, without a group that sees everything.
const PASSING: [&[Option<usize>]; 3] = [&[Some(2)], &[Some(6)], &[Some(2), Some(3)]];

/// The scenario of a seed.
pub(super) fn scenario(seed: u64) -> Scenario {
    let mut random = Random::new(seed);
    let mut setup = setup(&mut random);
    let mut users = Users::new(&mut random, &setup);
    match random.below(8) {
        0 => squeeze(&mut random, &mut setup, &mut users),
        1 => crowd(&mut random, &mut setup, &mut users),
        2 => comeback(&mut random, &mut setup, &mut users),
        3 => passing(&mut random, &mut setup, &mut users),
        _ => {}
    }
    let mut actions = users.actions(&mut random, &setup);
    await_tokens(seed, &mut actions);
    Scenario::new(setup, actions)
}

/// Has some requests await their tokens: in some scenarios nobody, in some everybody. Drawn apart from all else, which
/// stays what it was before there were such requests.
fn await_tokens(seed: u64, actions: &mut [(u64, Action)]) {
    let mut random = Random::new(mix(seed ^ 0xa3a1_75ed));
    let share = *random.one_of(&[0, 0, 10, 50, 100]);
    for (_, action) in actions {
        if let Action::Submit(ask) = action {
            ask.request.awaits_tokens = random.chance(share);
        }
    }
}

fn setup(random: &mut Random) -> Setup {
    let windows: &[Option<usize>] = ARRANGEMENTS[random.below(ARRANGEMENTS.len())];
    let groups = LayerGroups::new(windows).expect("valid groups");
    let max_num_seqs = *random.one_of(&[1, 2, 4, 8, 8, 16]);
    let max_model_len = *random.one_of(&[24, 48, 96, 96, 160]);
    let spare = *random.one_of(&[0, 1, 8, 8, 24, 64, 256]);
    let block_size = *random.one_of(&[1, 2, 4, 4, 4, 8, 16]);
    let mut cache = CacheSpec { groups, prefix_caching: random.chance(80), ..CacheSpec::new(block_size, 0) };
    let alone = cache.pages_for(max_model_len - 1);
    let all = alone * max_num_seqs;
    cache.num_blocks = match random.below(10) {
        0 => alone,
        1 => (alone * random.between(40, 100) / 100).max(1),
        2..=5 => alone + random.below(alone + 1),
        6..=8 => alone + random.below(2 * alone + 1).min(all),
        _ => all + random.below(alone + 1),
    };
    let config = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + spare,
        max_model_len,
        max_waiting_requests: *random.one_of(&[4, 32, 200]),
        priority_aging_ms: *random.one_of(&[0, 1, 20, 1000]),
    };
    let cost = *random.one_of(&[CostModel::ONE_CARD, CostModel::THREE_CARDS]);
    let depth = random.between(1, 2);
    let mut late_transfers = None;
    if random.chance(40) {
        // From pools that are full at once to some that hold everything.
        cache.host_blocks = *random.one_of(&[1, 5, 20, 60, 400]) * groups.count();
        late_transfers = random.chance(80).then(|| random.next());
    }
    Setup { config, cache, cost, depth, late_transfers, events_per_check: 1 }
}

/// Long answers of low priority, in a pool for little more than one of them, and others that come before them again and
/// again: so some give way as often as may be.
fn squeeze(random: &mut Random, setup: &mut Setup, users: &mut Users) {
    (setup.config.max_model_len, users.max_model_len) = (160, 160);
    setup.cache.block_size = setup.cache.block_size.min(4);
    let alone = setup.cache.pages_for(setup.config.max_model_len - 1);
    setup.cache.num_blocks = alone + random.below(alone / 4 + 1);
    (setup.config.max_waiting_requests, setup.config.priority_aging_ms) = (200, 1000);
    setup.config.max_num_seqs = setup.config.max_num_seqs.max(4);
    setup.config.max_num_batched_tokens = setup.config.max_num_batched_tokens.max(12);
    (users.lengths, users.repeating) = (Lengths::Squeezed, 0);
    (users.with_prefix, users.with_choices) = (*random.one_of(&[0, 0, 20]), *random.one_of(&[0, 0, 5]));
    (users.pressure, users.burst, users.cancelling) = (random.between(6, 20) as u64, 1, 0);
}

/// Many come at once with the same long beginning, which takes several steps to compute, and some soon leave.
fn crowd(random: &mut Random, setup: &mut Setup, users: &mut Users) {
    let seqs = setup.config.max_num_seqs;
    setup.config.max_num_batched_tokens = seqs + random.below(8);
    setup.cache.prefix_caching = true;
    users.prefixes.truncate(1);
    users.prefixes[0] = (0..users.max_model_len * 3 / 5).map(|_| random.below(VOCAB) as u32).collect();
    (users.with_prefix, users.burst, users.cancelling, users.salted) = (100, 20, 40, 0);
}

/// Long beginnings that take turns in a pool for little more than one of them, and a host that keeps them all. Some
/// leave while theirs are loaded.
fn comeback(random: &mut Random, setup: &mut Setup, users: &mut Users) {
    setup.cache.prefix_caching = true;
    setup.cache.block_size = *random.one_of(&[1, 1, 2, 4]);
    let alone = setup.cache.pages_for(setup.config.max_model_len - 1);
    setup.cache.num_blocks = alone + random.below(alone / 2 + 1);
    setup.cache.host_blocks = 8 * setup.cache.num_blocks;
    setup.late_transfers = random.chance(90).then(|| random.next());
    setup.config.max_num_seqs = setup.config.max_num_seqs.max(4);
    setup.config.max_num_batched_tokens = setup.config.max_num_batched_tokens.max(12);
    let len = users.max_model_len * 4 / 5;
    users.prefixes = (0..6).map(|_| (0..len).map(|_| random.below(VOCAB) as u32).collect()).collect();
    (users.lengths, users.with_prefix, users.salted) = (Lengths::Chat, 100, 0);
    (users.pressure, users.burst) = (random.between(4, 12) as u64, random.between(1, 2) as u64);
    (users.cancelling, users.with_choices) = (*random.one_of(&[5, 30]), 40);
}

/// Windows only, over small blocks, in a pool for a few of them: whoever runs gives a page up as often as it takes one.
fn passing(random: &mut Random, setup: &mut Setup, users: &mut Users) {
    let windows = random.one_of(&PASSING);
    setup.cache.groups = LayerGroups::new(windows).expect("valid groups");
    setup.cache.block_size = *random.one_of(&[1, 1, 2]);
    let alone = setup.cache.pages_for(setup.config.max_model_len - 1);
    setup.cache.num_blocks = alone * random.between(200, 400) / 100;
    setup.cache.prefix_caching = random.chance(50);
    (users.lengths, users.pressure, users.cancelling) = (Lengths::Mixed, random.between(3, 12) as u64, 5);
}

/// Lengths of prompts and generations.
#[derive(Clone, Copy, Debug)]
enum Lengths {
    /// Short or middling both.
    Chat,
    /// Long prompts with short answers.
    Documents,
    /// Short prompts with long answers.
    Stories,
    /// A word on each token of a prompt.
    Scoring,
    /// Any of these.
    Mixed,
    /// One in eight is as long as may be and can wait, the others are short and cannot.
    Squeezed,
}

/// Who asks, and how.
struct Users {
    lengths: Lengths,
    /// What prompts begin with.
    prefixes: Vec<Vec<u32>>,
    /// Shares, in percent.
    with_prefix: usize,
    repeating: usize,
    salted: usize,
    with_priority: usize,
    with_choices: usize,
    cancelling: usize,
    breaking: usize,
    losses: usize,
    /// Steps between two that come, on the average.
    pressure: u64,
    /// How many come at once.
    burst: u64,
    max_model_len: usize,
}

impl Users {
    fn new(random: &mut Random, setup: &Setup) -> Self {
        let max_model_len = setup.config.max_model_len;
        let mut prefixes = Vec::new();
        for _ in 0..random.between(1, 3) {
            let len = random.between(1, max_model_len * 3 / 5);
            let prefix: Vec<u32> = (0..len).map(|_| random.below(VOCAB) as u32).collect();
            // One that is another's but for its first token: later blocks are alike, and are not the same.
            let mut other = prefix.clone();
            other[0] = (other[0] + 1) % VOCAB as u32;
            prefixes.extend([prefix, other]);
        }
        Self {
            lengths: *random.one_of(&[
                Lengths::Chat,
                Lengths::Documents,
                Lengths::Stories,
                Lengths::Scoring,
                Lengths::Mixed,
            ]),
            prefixes,
            with_prefix: *random.one_of(&[0, 50, 90]),
            repeating: *random.one_of(&[0, 10, 40]),
            salted: *random.one_of(&[0, 0, 30]),
            with_priority: *random.one_of(&[0, 20, 80]),
            with_choices: *random.one_of(&[0, 0, 10, 40]),
            cancelling: *random.one_of(&[0, 5, 30]),
            breaking: *random.one_of(&[0, 0, 3]),
            losses: *random.one_of(&[0, 0, 2]),
            // From far too many to few.
            pressure: *random.one_of(&[1, 3, 6, 12, 12, 40]),
            burst: *random.one_of(&[1, 1, 1, 6, 20]),
            max_model_len,
        }
    }

    fn actions(&self, random: &mut Random, setup: &Setup) -> Vec<(u64, Action)> {
        let mut load = Load::default();
        load.add_rows(setup.config.max_num_seqs, setup.config.max_model_len / 2, &setup.cache);
        let step_ns = setup.cost.step_ns(&load, setup.cache.block_size);
        let (mut now_ns, mut actions, mut asks) = (0, Vec::new(), Vec::<Ask>::new());
        while asks.len() < 120 {
            now_ns += random.exponential(step_ns * self.pressure * self.burst);
            for _ in 0..self.burst {
                let ask = self.ask(random, &asks);
                let submit = actions.len();
                actions.push((now_ns, Action::Submit(ask.clone())));
                if random.chance(self.cancelling) {
                    let steps = *random.one_of(&[1, 3, 12]);
                    let at_ns = now_ns + random.exponential(step_ns * steps);
                    let choice = (ask.choices > 1).then(|| random.below(ask.choices));
                    actions.push((
                        at_ns,
                        Action::Cancel { submit, choice: choice.filter(|_| random.chance(70)) },
                    ));
                }
                asks.push(ask);
            }
            let absent_ns = random.exponential(step_ns * 20);
            if random.chance(self.losses) {
                actions.push((now_ns + random.exponential(step_ns * 4), Action::Lose { absent_ns }));
            }
            if random.chance(self.losses) {
                actions.push((now_ns + random.exponential(step_ns * 4), Action::Garble { absent_ns }));
            }
            if random.chance(self.losses * 2) {
                actions.push((now_ns, Action::Relearn));
            }
        }
        actions
    }

    fn ask(&self, random: &mut Random, before: &[Ask]) -> Ask {
        if !before.is_empty() && random.chance(self.repeating) {
            return self.again(random, before);
        }
        let mut request = self.request(random);
        if random.chance(self.with_prefix) {
            let prefix = random.one_of(&self.prefixes);
            let most = self.max_model_len.saturating_sub(prefix.len() + request.max_tokens);
            request.prompt.truncate(random.below(most + 1));
            request.prompt.splice(0..0, prefix.iter().copied());
            request.max_tokens = request.max_tokens.min(self.max_model_len - request.prompt.len());
        }
        let choices = if random.chance(self.with_choices) { *random.one_of(&[2, 3, 8]) } else { 1 };
        let breaks_after = random.chance(self.breaking).then(|| random.below(6));
        Ask { request, choices, breaks_after }
    }

    /// The same once more, or the next turn of the conversation.
    fn again(&self, random: &mut Random, before: &[Ask]) -> Ask {
        let recent = before.len().saturating_sub(12);
        let mut ask = before[random.between(recent, before.len() - 1)].clone();
        if random.chance(50) {
            let turn = said(&ask.request, random.between(0, 40));
            ask.request.prompt = turn;
            ask.request.prompt.extend((0..random.between(1, 6)).map(|_| random.below(VOCAB) as u32));
            ask.request.prompt.truncate(self.max_model_len - 1);
            ask.request.max_tokens =
                ask.request.max_tokens.min(self.max_model_len - ask.request.prompt.len());
        }
        ask.request.sampling.seed = random.next();
        ask
    }

    fn request(&self, random: &mut Random) -> Request {
        let most = self.max_model_len;
        let lengths = match self.lengths {
            Lengths::Mixed => {
                *random.one_of(&[Lengths::Chat, Lengths::Documents, Lengths::Stories, Lengths::Scoring])
            }
            lengths => lengths,
        };
        let (prompt_len, mut max_tokens) = match lengths {
            Lengths::Documents => (random.between(most / 3, most - 1), random.between(1, 6)),
            Lengths::Stories => (random.between(1, 8), random.between(most / 4, most)),
            Lengths::Scoring => (random.between(1, most / 2), random.below(2)),
            Lengths::Squeezed => (random.between(1, 6), random.between(most / 6, most / 2)),
            Lengths::Chat | Lengths::Mixed => (random.between(1, most / 3), random.between(1, most / 2)),
        };
        let can_wait = matches!(lengths, Lengths::Squeezed) && random.chance(12);
        if can_wait {
            max_tokens = most;
        }
        // Some ask for more than there can be.
        if can_wait || !random.chance(2) {
            max_tokens = max_tokens.min(most - prompt_len);
        }
        let scores = match lengths {
            Lengths::Scoring => 80,
            _ => 5,
        };
        let priority = match lengths {
            Lengths::Squeezed if can_wait => 9,
            Lengths::Squeezed => 0,
            _ if random.chance(self.with_priority) => random.between(0, 6) as i32 - 3,
            _ => 0,
        };
        Request {
            prompt: (0..prompt_len).map(|_| random.below(VOCAB) as u32).collect(),
            sampling: SamplingParams { seed: random.next(), ..SamplingParams::default() },
            max_tokens,
            stop_token_ids: if !can_wait && random.chance(50) { vec![STOP] } else { Vec::new() },
            logprobs: random.chance(10).then_some(2),
            prompt_logprobs: random.chance(scores).then_some(1),
            priority,
            cache_salt: random.chance(self.salted).then(|| salt(1 + random.below(2) as u64)),
            awaits_tokens: false,
        }
    }
}

/// A prompt, and up to so many tokens that its request is answered with.
pub(super) fn said(request: &Request, tokens: usize) -> Vec<u32> {
    let (mut said, mut history) = (request.prompt.clone(), history_of(&request.prompt));
    for _ in 0..tokens.min(request.max_tokens) {
        let token = draw(history, said.len(), request.prompt.len(), request.sampling.seed);
        history = link(history, token);
        said.push(token);
        if request.stop_token_ids.contains(&token) {
            break;
        }
    }
    said
}
