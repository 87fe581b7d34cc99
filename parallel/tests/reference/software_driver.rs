//! The CUDA model as it is shipped, over a software driver: every rank a thread with a device of its own.

mod overlap;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use consort_kernels::{
    DType, KernelError,
    cuda::device::CudaError,
    sampling::{Adjustments, SamplingParams, TokenHistory, sample},
};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    ids::{BlockId, Rank},
    kv::KvStore,
    model::{
        self, AllReduce, Draw, LoadError, LoadOptions, ModelError, PromptToken, RowRequest, STEP_LIMIT,
        TokenLogprobs, kv_layout, load,
    },
    partition::Partition,
};
use consort_software_driver::{in_child, in_child_reported};

use crate::{
    harness::{BLOCK_SIZE, Differences, Place, Setup, fixtures, teacher_forced, top},
    tiny,
};

const FAST: Place = Place::Cuda { deterministic: false };
const INVARIANT: Place = Place::Cuda { deterministic: true };

fn open(name: &str) -> Arc<Checkpoint> {
    Checkpoint::open(&fixtures().join(name)).unwrap()
}

/// Logits against `transformers`, no farther from it than the CPU's bfloat16 path.
fn compare(name: &str, width: usize, place: Place, chunk: usize, together: bool) {
    let checkpoint = open(name);
    let (prompts, expected) = tiny::reference(name);
    let differ = |got: &[Vec<f32>]| {
        let mut differences = Differences::default();
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            differences.add(*got, *expected);
        }
        differences
    };
    let cpu = differ(&teacher_forced(&checkpoint, Setup::new(1, DType::BF16, 1000), &prompts));
    let setup = Setup { place, together, ..Setup::new(width, DType::BF16, chunk) };
    let got = teacher_forced(&checkpoint, setup, &prompts);
    let cuda = differ(&got);
    assert_eq!(cuda.count(), expected.iter().map(Vec::len).sum::<usize>());
    println!(
        "{name} {place:?} width {width} chunk {chunk}: RMS {:.2e} (CPU {:.2e}), largest {:.2e} (CPU {:.2e})",
        cuda.rms(),
        cpu.rms(),
        cuda.largest,
        cpu.largest
    );
    assert!(cuda.rms() < 1.5 * cpu.rms() && cuda.largest < 2.0 * cpu.largest, "{name} width {width}");
    let vocabulary = checkpoint.config().vocab_size;
    let rows = got.iter().zip(&expected);
    for (got, expected) in
        rows.flat_map(|(got, expected)| got.chunks_exact(vocabulary).zip(expected.chunks_exact(vocabulary)))
    {
        let (ours, theirs) = (top(got) as usize, top(expected) as usize);
        let margin = expected[theirs] - expected[ours];
        assert!(margin <= 2.0 * cpu.largest, "{name} width {width}: {ours} over {theirs}, {margin} apart");
    }
}

#[test]
fn software_driver_runs_the_tiny_llama_alone_and_over_three_devices_like_transformers() {
    let test =
        "software_driver::software_driver_runs_the_tiny_llama_alone_and_over_three_devices_like_transformers";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")], || {
        compare("tiny_llama", 1, FAST, 1000, false);
        // One token a step and sequence: decodes from graphs.
        compare("tiny_llama", 1, FAST, 2, true);
        compare("tiny_llama_odd", 3, FAST, 1000, false);
        compare("tiny_llama_odd", 3, FAST, 2, true);
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches > 20 && report.launches > 100, "{report:?}");
}

#[test]
fn software_driver_ranks_that_map_each_others_memory_give_the_bits_of_those_that_address_it() {
    let test = "software_driver::\
                software_driver_ranks_that_map_each_others_memory_give_the_bits_of_those_that_address_it";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")], || {
        let checkpoint = open("tiny_llama_odd");
        let (prompts, _) = tiny::reference("tiny_llama_odd");
        // Prompts in parts, and decodes together, by graphs.
        for (chunk, together) in [(7, false), (prompts.len(), true)] {
            let setup = Setup { place: INVARIANT, together, ..Setup::new(3, DType::BF16, chunk) };
            let addressed = teacher_forced(&checkpoint, setup, &prompts);
            let mapped = teacher_forced(&checkpoint, Setup { place: Place::Mapped, ..setup }, &prompts);
            assert!(addressed == mapped, "in steps of {chunk}");
        }
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    // Of each of two groups every rank made one piece of memory and mapped three.
    let calls = |name: &str| report.calls.get(name).copied().unwrap_or(0);
    assert_eq!((calls("cuMemCreate"), calls("cuMemMap"), calls("cuMemUnmap")), (6, 18, 18), "{report:?}");
}

#[test]
fn software_driver_gives_the_same_logits_whenever_work_runs() {
    for order in ["eager", "random:1", "random:2"] {
        let test = "software_driver::software_driver_gives_the_same_logits_whenever_work_runs";
        let environment =
            [("CONSORT_SOFTWARE_DRIVER_DEVICES", "3"), ("CONSORT_SOFTWARE_DRIVER_ORDER", order)];
        in_child(test, &environment, || {
            compare("tiny_llama_odd", 3, FAST, 7, false);
            compare("tiny_mistral", 1, FAST, 2, true);
        });
    }
}

#[test]
fn software_driver_gives_a_row_the_same_bits_in_any_company_where_that_is_asked_for() {
    let test =
        "software_driver::software_driver_gives_a_row_the_same_bits_in_any_company_where_that_is_asked_for";
    in_child(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")], || {
        let checkpoint = open("tiny_llama_odd");
        let (prompts, _) = tiny::reference("tiny_llama_odd");
        let run = |chunk, together, prompts: &[Vec<u32>]| {
            let setup = Setup { place: INVARIANT, together, ..Setup::new(3, DType::BF16, chunk) };
            teacher_forced(&checkpoint, setup, prompts)
        };
        let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let whole = run(1000, false, &prompts);
        assert!(bits(&run(1000, true, &prompts)) == bits(&whole), "filled in together");
        assert!(bits(&run(prompts.len(), true, &prompts)) == bits(&whole), "decoded together, by graphs");
        assert!(bits(&run(1, false, &prompts[1..])) == bits(&whole[1..]), "decoded alone, by graphs");
        assert!(bits(&run(7, false, &prompts[..1])) == bits(&whole[..1]), "in parts of seven");
    });
}

/// One step of one sequence of so many tokens, whose last rows are kept.
fn step(tokens: usize, kept: usize, vocabulary: usize) -> Batch {
    Batch {
        tokens: (0..tokens).map(|at| (at * 37 % vocabulary) as u32).collect(),
        positions: (0..tokens as u32).collect(),
        spans: vec![BatchSpan {
            rows: 0..tokens,
            context_len: tokens,
            table: 0..tokens.div_ceil(BLOCK_SIZE),
        }],
        tables: vec![(0..tokens.div_ceil(BLOCK_SIZE) as u32).map(BlockId).collect()],
        output_rows: (tokens - kept..tokens).collect(),
    }
}

#[test]
fn software_driver_draws_the_tokens_and_log_probabilities_that_the_host_draws_from_the_same_logits() {
    let test = "software_driver::\
                software_driver_draws_the_tokens_and_log_probabilities_that_the_host_draws_from_the_same_logits";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")], || {
        for width in [1, 2] {
            std::thread::scope(|scope| {
                for mut comm in LocalGroup::new(width) {
                    scope.spawn(move || draws_like_the_host(&mut comm, width));
                }
            });
        }
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}

/// Steps of up to 128 rows.
fn options() -> LoadOptions {
    LoadOptions {
        dtype: DType::BF16,
        max_batch_tokens: 128,
        block_size: BLOCK_SIZE,
        max_num_seqs: 8,
        max_model_len: 256,
        num_blocks: 4096,
        step_limit: STEP_LIMIT,
        deterministic: false,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    }
}

/// More rows than are drawn at a time, each asked for in another way.
fn draws_like_the_host(comm: &mut dyn Collective, width: usize) {
    const ROWS: usize = 70;
    let checkpoint = open("tiny_llama");
    let partition = Partition::new(checkpoint.config(), width, None).unwrap();
    let (rank, vocabulary) = (comm.rank(), checkpoint.config().vocab_size);
    let options = options();
    let device = Setup { place: FAST, ..Setup::new(width, DType::BF16, 128) }.device(rank);
    let mut model = load(&device, &checkpoint, &partition, rank, &options, &|_, _| {}).unwrap();
    model.join(comm).unwrap();
    let layout = kv_layout(checkpoint.config(), partition.share(rank), DType::BF16, BLOCK_SIZE).unwrap();
    let mut kv = KvStore::new(&device, layout, 16).unwrap();
    model.forward(&step(100, ROWS, vocabulary), &mut kv, comm).unwrap();

    let mut logits = Vec::new();
    for start in (0..ROWS).step_by(model.logit_rows_max()) {
        let end = ROWS.min(start + model.logit_rows_max());
        logits.extend_from_slice(model.logits(start..end, comm).unwrap());
    }
    let params: Vec<SamplingParams> = (0..ROWS).map(|row| asked(row, vocabulary)).collect();
    let histories: Vec<TokenHistory> = params
        .iter()
        .map(|params| {
            let mut history = TokenHistory::new(3, &params.adjustments);
            history.extend(&[5, 9, 9, 1, 40, 9]);
            history
        })
        .collect();
    let requests: Vec<RowRequest<'_>> = params
        .iter()
        .zip(&histories)
        .enumerate()
        .map(|(row, (sampling, history))| RowRequest {
            prompt: (row % 3 == 0).then_some(PromptToken { token: row as u32, top: row as u32 % 6 }),
            draw: (row % 5 != 4).then_some(Draw {
                sampling,
                history,
                position: row as u64,
                logprobs: (row % 2 == 0).then_some(row as u32 % 4),
            }),
        })
        .collect();
    for report in [true, false] {
        let outcomes = model.outcomes(&requests, report, comm).unwrap();
        assert_eq!(outcomes.len(), ROWS);
        for (row, (outcome, request)) in outcomes.iter().zip(&requests).enumerate() {
            let raw = &logits[row * vocabulary..(row + 1) * vocabulary];
            let expected = request.prompt.filter(|_| report);
            let expected = expected.map(|prompt| TokenLogprobs::of(raw, prompt.token, prompt.top));
            assert_near(outcome.prompt.as_ref(), expected.as_ref(), row);
            assert_eq!(outcome.drawn.is_some(), request.draw.is_some(), "row {row}");
            let (Some(drawn), Some(draw)) = (&outcome.drawn, &request.draw) else { continue };
            let mut changed = raw.to_vec();
            draw.sampling.adjustments.apply(&mut changed, draw.history);
            let token = sample(&mut changed, draw.sampling, draw.position);
            assert_eq!(drawn.token, token, "row {row}: {:?}", draw.sampling);
            let expected = draw.logprobs.filter(|_| report).zip(token);
            let expected = expected.map(|(top, token)| TokenLogprobs::of(raw, token, top));
            assert_near(drawn.logprobs.as_ref(), expected.as_ref(), row);
        }
    }
    // A rank that leaves ends the group.
    comm.barrier().unwrap();
}

/// The same tokens; the device's sums of exponentials differ from the host's in the last bits.
fn assert_near(got: Option<&TokenLogprobs>, expected: Option<&TokenLogprobs>, row: usize) {
    let (Some(got), Some(expected)) = (got, expected) else {
        return assert_eq!(got, expected, "row {row}");
    };
    let pairs = |logprobs: &TokenLogprobs| {
        let own = (logprobs.token, logprobs.logprob);
        [own].into_iter().chain(logprobs.top.iter().copied()).collect::<Vec<_>>()
    };
    let (got, expected) = (pairs(got), pairs(expected));
    assert_eq!(got.len(), expected.len(), "row {row}");
    for ((token, value), (expected_token, expected_value)) in got.into_iter().zip(expected) {
        assert!(token == expected_token && (value - expected_value).abs() < 1e-4, "row {row}: {value}");
    }
}

/// Greedy, free, filtered, biased, penalised: a mixture by row.
fn asked(row: usize, vocabulary: usize) -> SamplingParams {
    let adjustments = match row % 4 {
        0 => Adjustments::default(),
        1 => Adjustments {
            logit_bias: vec![(7, 3.0), (vocabulary as u32 - 1, -2.0)],
            ..Adjustments::default()
        },
        2 => Adjustments { repetition_penalty: 1.3, presence_penalty: 0.5, ..Adjustments::default() },
        _ => Adjustments { min_tokens: 10, masked_until_min: vec![2, 3], ..Adjustments::default() },
    };
    SamplingParams {
        temperature: if row.is_multiple_of(7) { 0.0 } else { 0.3 + row as f32 / 50.0 },
        top_k: (row % 3 == 1).then_some(1 + row as u32 % 9),
        top_p: if row % 5 == 2 { 0.8 } else { 1.0 },
        min_p: if row % 6 == 3 { 0.05 } else { 0.0 },
        seed: row as u64 * 77,
        adjustments,
    }
}

/// What a rank alone says of its second step; the first must succeed. Each step decodes one token, by graph.
fn second_step(step_limit: Duration) -> Result<(), ModelError> {
    let checkpoint = open("tiny_llama");
    let partition = Partition::new(checkpoint.config(), 1, None).unwrap();
    let mut comm = LocalGroup::new(1).remove(0);
    let (rank, vocabulary) = (comm.rank(), checkpoint.config().vocab_size);
    let options = LoadOptions {
        dtype: DType::BF16,
        max_batch_tokens: 8,
        block_size: BLOCK_SIZE,
        max_num_seqs: 8,
        max_model_len: 64,
        num_blocks: 4096,
        step_limit,
        deterministic: false,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    };
    let device = Setup { place: FAST, ..Setup::new(1, DType::BF16, 8) }.device(rank);
    let mut model = load(&device, &checkpoint, &partition, rank, &options, &|_, _| {}).unwrap();
    model.join(&mut comm).unwrap();
    let layout = kv_layout(checkpoint.config(), partition.share(rank), DType::BF16, BLOCK_SIZE).unwrap();
    let mut kv = KvStore::new(&device, layout, 4).unwrap();
    let mut outcome = Ok(());
    for at in 0..2 {
        outcome.as_ref().expect("the first step succeeds");
        let mut batch = step(at + 1, 1, vocabulary);
        let last = batch.tokens.split_off(at);
        batch.tokens = last;
        batch.positions = vec![at as u32];
        batch.spans[0].rows = 0..1;
        batch.output_rows = vec![0];
        outcome = model
            .forward(&batch, &mut kv, &mut comm)
            .and_then(|()| model.logits(0..1, &mut comm).map(|_| ()));
    }
    outcome
}

fn cuda_error(outcome: Result<(), ModelError>) -> CudaError {
    match outcome {
        Err(ModelError::Kernel(KernelError::Cuda(error))) => *error,
        other => panic!("{other:?}"),
    }
}

/// Has a rank alone do `steps` of 100 rows, of up to 128.
fn steps_of_many_rows(steps: usize) {
    let checkpoint = open("tiny_llama");
    let partition = Partition::new(checkpoint.config(), 1, None).unwrap();
    let mut comm = LocalGroup::new(1).remove(0);
    let options = options();
    let device = Setup { place: FAST, ..Setup::new(1, DType::BF16, 128) }.device(Rank(0));
    let mut model = load(&device, &checkpoint, &partition, Rank(0), &options, &|_, _| {}).unwrap();
    model.join(&mut comm).unwrap();
    let layout = kv_layout(checkpoint.config(), partition.share(Rank(0)), DType::BF16, BLOCK_SIZE).unwrap();
    let mut kv = KvStore::new(&device, layout, 16).unwrap();
    for _ in 0..steps {
        let batch = step(100, 1, checkpoint.config().vocab_size);
        model.forward(&batch, &mut kv, &mut comm).unwrap();
        model.logits(0..1, &mut comm).unwrap();
    }
}

#[test]
fn software_driver_a_step_of_many_rows_multiplies_as_was_rehearsed_at_load() {
    let test = "software_driver::software_driver_a_step_of_many_rows_multiplies_as_was_rehearsed_at_load";
    let asked = |steps: &str| {
        let report = in_child_reported(test, &[("STEPS", steps)], || {
            steps_of_many_rows(std::env::var("STEPS").unwrap().parse().unwrap());
        })?;
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
        Some(["cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"].map(|name| report.calls[name]))
    };
    let Some([chosen, multiplied]) = asked("0") else { return };
    let Some(after_two) = asked("2") else { return };
    println!("{chosen} chosen, {multiplied} multiplied at load; {after_two:?} after two steps");
    assert_eq!((chosen, multiplied), (4, 4), "for each matrix of a layer one algorithm");
    let layers = open("tiny_llama").config().num_layers as u64;
    assert_eq!(after_two, [4, 4 + 2 * 4 * layers], "steps choose nothing");
}

#[test]
fn software_driver_a_device_that_hangs_is_a_typed_error_within_its_limit() {
    let test = "software_driver::software_driver_a_device_that_hangs_is_a_typed_error_within_its_limit";
    in_child(test, &[("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:2=hang")], || {
        let started = Instant::now();
        let error = cuda_error(second_step(Duration::from_secs(5)));
        assert!(matches!(error, CudaError::Timeout { .. }), "{error:?}");
        // What is dropped after it waits no more than a moment.
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    });
}

#[test]
fn software_driver_a_lost_device_is_a_typed_error_and_stays_one() {
    let test = "software_driver::software_driver_a_lost_device_is_a_typed_error_and_stays_one";
    in_child(test, &[("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:2=700")], || {
        let error = cuda_error(second_step(Duration::from_secs(60)));
        assert!(matches!(error, CudaError::Lost { .. }), "{error:?}");
    });
}

#[test]
fn software_driver_a_device_without_memory_for_a_graph_decodes_without_one() {
    let test = "software_driver::software_driver_a_device_without_memory_for_a_graph_decodes_without_one";
    let faults = ("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphInstantiateWithFlags:1=2");
    let report = in_child_reported(test, &[faults], || second_step(Duration::from_secs(60)).unwrap());
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert_eq!(report.graph_launches, 1, "the second step has a graph again");
    assert!(report.launches > 20, "the first step's kernels: {report:?}");
}

#[test]
fn software_driver_a_card_too_small_says_what_is_wanted_and_what_is_free() {
    let test = "software_driver::software_driver_a_card_too_small_says_what_is_wanted_and_what_is_free";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_MEMORY", "3000000")], || {
        let checkpoint = open("tiny_llama");
        let partition = Partition::new(checkpoint.config(), 1, None).unwrap();
        let options = LoadOptions {
            dtype: DType::BF16,
            max_batch_tokens: 4096,
            block_size: BLOCK_SIZE,
            max_num_seqs: 8,
            max_model_len: 64,
            num_blocks: 4096,
            step_limit: STEP_LIMIT,
            deterministic: true,
            separate_processes: false,
            all_reduce: AllReduce::Auto,
        };
        let device = Setup { place: FAST, ..Setup::new(1, DType::BF16, 8) }.device(Rank(0));
        let loaded = load(&device, &checkpoint, &partition, Rank(0), &options, &|_, _| {});
        let Err(LoadError::Kernel(KernelError::Cuda(error))) = loaded.map(|_| ()) else { panic!("it fits") };
        let CudaError::OutOfMemory { wanted, free, ref parts, .. } = *error else { panic!("{error:?}") };
        let multiprocessors = 4;
        let known = model::cuda::memory(checkpoint.config(), &partition, Rank(0), &options, multiprocessors);
        assert_eq!(wanted, Some(known.unwrap().total_bytes()), "as computed from headers alone");
        assert!(free.is_some_and(|free| free <= 3_000_000) && !parts.is_empty(), "{error}");
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}
