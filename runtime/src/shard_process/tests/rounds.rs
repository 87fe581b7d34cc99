//! Many lives of a group of which one rank after another is lost: what is left behind by ranks that live through all of
//! them, and what they load again.

use std::sync::mpsc::{Receiver, Sender, channel};

use consort_actors::{
    Epoch, LoadProgress, ProgressReporter, Rejoined, SequenceId, ShardError, ShardExecutor, ShardFactory,
    Step,
    plan::{NewSequence, Output, Span, StepPlan, Tokens},
};
use consort_kernels::sampling::SamplingParams;
use consort_parallel::{
    collective::Collective,
    ids::{BlockId, Rank},
};

use consort_software_driver::in_child;

use super::*;
use crate::shard_process::ProcessFactory;

const RANKS: usize = 3;
const PROMPT_TOKENS: u32 = 40;
/// Lives before what is held is counted: whatever is taken once is there by then.
const SETTLING: u64 = 6;
const ROUNDS: u64 = 50;
/// Lives of a rank that lives through everything.
pub(super) const LIVES_OF_ALL: u64 = SETTLING + ROUNDS;
/// Of a wait for anything.
const LIMIT: Duration = Duration::from_secs(60);

/// How a rank ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Strike {
    /// When its step is done.
    KillIdle,
    KillInStep,
    StopInStep,
}

impl Strike {
    fn of(round: u64) -> Self {
        match round {
            // It takes as long as a process may be silent.
            _ if round % 10 == 9 => Strike::StopInStep,
            _ if round.is_multiple_of(2) => Strike::KillInStep,
            _ => Strike::KillIdle,
        }
    }

    fn signal(self) -> Signal {
        if self == Strike::StopInStep { Signal::STOP } else { Signal::KILL }
    }

    /// What is said of a rank that it hit.
    fn says(self, error: &str) -> bool {
        match self {
            Strike::StopInStep => error.contains("was silent for"),
            Strike::KillIdle | Strike::KillInStep => error.contains("was killed by SIGKILL"),
        }
    }
}

/// A life of the group, for one rank.
struct Life {
    epoch: Epoch,
    plan: Arc<StepPlan>,
    is_hit: bool,
}

enum Said {
    /// It is about to wait for its step, or for its end.
    Begun,
    /// Its tokens, or why there are none.
    Ended(Result<Vec<u32>, ShardError>),
}

fn prompt(epoch: Epoch) -> Arc<StepPlan> {
    let (sequence, tokens): (_, Vec<u32>) = (SequenceId(1), (0..PROMPT_TOKENS).collect());
    let new = NewSequence {
        sequence,
        prompt_len: tokens.len(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        logprobs: None,
    };
    let span = Span {
        sequence,
        cached: Default::default(),
        tokens: Tokens::Given(tokens),
        new_blocks: (0..PROMPT_TOKENS.div_ceil(16)).map(BlockId).collect(),
        output: Output::Sample,
    };
    Arc::new(StepPlan {
        epoch,
        step: Step(0),
        begin: vec![new],
        run: vec![span],
        copies: Vec::new(),
        saves: Vec::new(),
        loads: Vec::new(),
        await_transfers: false,
        end: Vec::new(),
    })
}

/// Waits for the step, and where the rank is hit for its loss.
fn outcome(executor: &mut Box<dyn ShardExecutor>, life: &Life) -> Result<Vec<u32>, ShardError> {
    let deadline = Instant::now() + LIMIT;
    let pipeline = executor.pipeline().expect("ranks elsewhere are pipelines");
    let result = loop {
        assert!(Instant::now() < deadline, "a step does not end");
        if let Some(result) = pipeline.finish(Duration::from_millis(50))? {
            break result;
        }
    };
    let sampled = result.outputs.iter().flat_map(|output| &output.sampled);
    let tokens = sampled.map(|sampled| sampled.token).collect();
    if !life.is_hit {
        return Ok(tokens);
    }
    loop {
        executor.check()?;
        assert!(Instant::now() < deadline, "a loss is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a rank's thread does: as the group's threads, without the group.
fn serve(
    factory: &ProcessFactory,
    rank: Rank,
    progress: &ProgressReporter,
    lives: &Receiver<(Life, Box<dyn Collective>)>,
    said: &Sender<Said>,
) {
    let mut present: Option<Box<dyn ShardExecutor>> = None;
    for (life, comm) in lives {
        let abort = comm.abort_handle();
        let mut executor = match present.take() {
            None => factory.build(rank, comm, progress).expect("it loads"),
            Some(mut executor) => {
                let rejoined = executor.rejoin(life.epoch, comm).expect("it lives");
                assert!(matches!(rejoined, Rejoined::Kept));
                executor
            }
        };
        executor.join().expect("all are there");
        executor.pipeline().expect("ranks elsewhere are pipelines").begin(&life.plan).expect("it lives");
        said.send(Said::Begun).expect("the test listens");
        let ended = outcome(&mut executor, &life);
        match &ended {
            Ok(_) | Err(ShardError::Aborted { .. }) => present = Some(executor),
            Err(error) => abort.abort(&error.to_string()),
        }
        said.send(Said::Ended(ended)).expect("the test listens");
    }
}

/// Descriptors, threads and mappings of a process.
fn held(process: &str) -> [usize; 3] {
    let count = |folder: &str| fs::read_dir(format!("/proc/{process}/{folder}")).expect("Linux").count();
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("Linux");
    [count("fd"), count("task"), maps.lines().filter(|line| line.contains("/memfd:")).count()]
}

/// A rank's thread in the engine, and what it has loaded.
struct Member {
    lives: Sender<(Life, Box<dyn Collective>)>,
    said: Receiver<Said>,
    loaded_bytes: Arc<Mutex<Vec<u64>>>,
}

impl Member {
    fn ended(&self) -> Result<Vec<u32>, ShardError> {
        match self.said.recv_timeout(LIMIT).expect("it comes to its end") {
            Said::Ended(ended) => ended,
            Said::Begun => panic!("it began twice"),
        }
    }

    /// Bytes of each of its loads.
    fn loads(&self) -> Vec<u64> {
        self.loaded_bytes.lock().expect("no reporter panics").clone()
    }
}

/// In a process of its own, whose descriptors are counted: runs `ROUNDS` lives of a group of `factory`'s ranks, and
/// loses rank 1 or rank 2 in each.
pub(super) fn lose_one_rank_after_another(factory: &ProcessFactory) {
    std::thread::scope(|scope| {
        let members: Vec<Member> = (0..RANKS as u16)
            .map(|rank| {
                let ((lives, orders), (tells, said)) = (channel(), channel());
                let loaded_bytes = Arc::new(Mutex::new(Vec::new()));
                let loaded = Arc::clone(&loaded_bytes);
                let note = move |LoadProgress { loaded_bytes, total_bytes, .. }| {
                    if loaded_bytes == total_bytes {
                        loaded.lock().expect("no reporter panics").push(loaded_bytes);
                    }
                };
                let progress = ProgressReporter::new(Rank(rank), Some(Arc::new(note)));
                scope.spawn(move || serve(factory, Rank(rank), &progress, &orders, &tells));
                Member { lives, said, loaded_bytes }
            })
            .collect();
        let (mut expected, mut survivor, mut before) = (None, 0, None);
        for round in 0..LIVES_OF_ALL {
            let (strike, hit) = (Strike::of(round), 1 + (round / 2 % 2) as usize);
            let epoch = Epoch(1 + round);
            let plan = prompt(epoch);
            let comms = factory.collective(RANKS).expect("a segment");
            for (at, (member, comm)) in members.iter().zip(comms).enumerate() {
                let life = Life { epoch, plan: Arc::clone(&plan), is_hit: at == hit };
                member.lives.send((life, comm)).expect("its thread lives");
            }
            for member in &members {
                let begun = member.said.recv_timeout(LIMIT).expect("it comes so far");
                assert!(matches!(begun, Said::Begun));
            }
            let running = shards();
            assert_eq!(running.len(), RANKS, "round {round}: {running:?}");
            if round == 0 {
                survivor = running[&0];
            }
            assert_eq!(running[&0], survivor, "round {round}");
            if round == SETTLING {
                before = Some((held("self"), held(&survivor.to_string())));
            }
            let others = || members.iter().enumerate().filter(|(at, _)| *at != hit);
            let mut ended = Vec::new();
            if strike == Strike::KillIdle {
                ended = others().map(|(at, member)| (at, member.ended())).collect();
                assert!(ended.iter().all(|(_, ended)| ended.is_ok()), "round {round}: {ended:?}");
            }
            signal(running[&(hit as u16)], strike.signal());
            let lost = members[hit].ended().expect_err("it was hit").to_string();
            assert!(strike.says(&lost), "round {round}, {strike:?}: {lost}");
            if strike != Strike::KillIdle {
                ended = others().map(|(at, member)| (at, member.ended())).collect();
            }
            for (at, ended) in ended {
                match ended {
                    // Rank 0 tells the tokens.
                    Ok(tokens) if at == 0 => {
                        assert_eq!(tokens.len(), 1, "round {round}");
                        assert_eq!(*expected.get_or_insert(tokens.clone()), tokens, "round {round}");
                    }
                    Ok(_) => {}
                    Err(ShardError::Aborted { reason }) => {
                        assert_eq!(reason, format!("rank {hit}: {lost}"), "round {round}");
                    }
                    Err(error) => panic!("round {round}: rank {at}: {error}"),
                }
            }
        }
        let (ours, theirs) = before.expect("it settled");
        let at_last = held(&survivor.to_string());
        let is_more = at_last.iter().zip(theirs).any(|(after, before)| *after > before);
        assert!(!is_more, "the process of rank 0 holds {at_last:?}, before {theirs:?}");
        let at_last = held("self");
        let is_more = at_last.iter().zip(ours).any(|(after, before)| *after > before);
        assert!(!is_more, "the engine's process holds {at_last:?}, before {ours:?}");
        assert!(expected.is_some(), "of ranks that were lost after their step");
        let loads: Vec<Vec<u64>> = members.iter().map(Member::loads).collect();
        assert!(loads.iter().flatten().all(|bytes| *bytes > 0), "{loads:?}");
        assert_eq!(loads[0].len(), 1, "rank 0 lived through everything and loaded once");
        // Each of the others once, and again in the life after each of its losses.
        let total = loads[1].len() + loads[2].len();
        assert_eq!(total as u64, 2 + (LIVES_OF_ALL - 1), "{loads:?}");
        drop(members);
    });
    assert!(shards().is_empty(), "{:?}", shards());
}

#[test]
fn fifty_losses_leave_nothing_behind_and_survivors_load_nothing_again() {
    let _guard = ONE_AT_A_TIME.blocking_lock();
    let test =
        "shard_process::tests::rounds::fifty_losses_leave_nothing_behind_and_survivors_load_nothing_again";
    in_child(test, &[], || {
        let folder = checkpoint();
        let settings = WorkSettings { silence_max: Duration::from_secs(4), ..WorkSettings::default() };
        let processes = processes_of("the_program_of_a_rank", settings);
        lose_one_rank_after_another(&ProcessFactory::new(model_factory(&folder, RANKS), processes));
    });
}
