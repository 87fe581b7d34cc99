//! Steps of one model, timed without scheduler, text or server: what the kernels and collectives alone allow.
//!
//! `cargo run --release -p consort-parallel --example model_speed -- MODEL [WIDTH] [THREADS_PER_RANK]`
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::{path::Path, process::ExitCode, sync::Arc, thread, time::Instant};

use consort_kernels::{DType, device::Device};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, Local, LocalGroup},
    ids::BlockId,
    kv::KvStore,
    model::{AllReduce, LoadOptions, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};

const BLOCK_SIZE: usize = 16;
const ROUNDS: usize = 9;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// (name, sequences, new tokens of each, context before them).
const CASES: [(&str, usize, usize, usize); 5] = [
    ("decode, batch 1", 1, 1, 128),
    ("decode, batch 8", 8, 1, 128),
    ("decode, batch 32", 32, 1, 128),
    ("prefill 128", 1, 128, 0),
    ("prefill 512", 1, 512, 0),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(model) = arguments.next() else {
        println!("usage: model_speed MODEL [WIDTH] [THREADS_PER_RANK]");
        return ExitCode::from(2);
    };
    let mut number = || arguments.next().and_then(|argument| argument.parse().ok()).unwrap_or(1usize);
    let (width, threads) = (number(), number());
    match run(Path::new(&model), width, threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(model: &Path, width: usize, threads: usize) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(model)?;
    let partition = Partition::new(checkpoint.config(), width, None)?;
    println!("{width} ranks of {threads} threads, bfloat16, medians of {ROUNDS} rounds");
    thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::new(width)
            .into_iter()
            .map(|comm| scope.spawn(|| one_rank(&checkpoint, &partition, comm, threads)))
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    })
}

fn one_rank(
    checkpoint: &Arc<Checkpoint>,
    partition: &Partition,
    mut comm: Local,
    threads: usize,
) -> Result<(), Failure> {
    let rank = comm.rank();
    let device = Device::cpu(threads)?;
    let options = LoadOptions {
        dtype: DType::BF16,
        max_batch_tokens: 512,
        block_size: BLOCK_SIZE,
        max_num_seqs: 512,
        max_model_len: 4096,
        num_blocks: 4096,
        step_limit: STEP_LIMIT,
        deterministic: true,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    };
    let begin = Instant::now();
    let mut model = load(&device, checkpoint, partition, rank, &options, &|_, _| {})?;
    if rank.index() == 0 {
        println!(
            "loaded in {:.2} s, {} bytes on rank 0",
            begin.elapsed().as_secs_f64(),
            model.weight_bytes()
        );
    }
    let layout = kv_layout(checkpoint.config(), partition.share(rank), DType::BF16, BLOCK_SIZE)?;
    let mut kv = KvStore::new(&device, layout, 32 * 640 / BLOCK_SIZE)?;
    for (name, sequences, new, context) in CASES {
        let batch = batch(sequences, new, context);
        let mut times = Vec::new();
        for _ in 0..=ROUNDS {
            comm.barrier()?;
            let begin = Instant::now();
            model.forward(&batch, &mut kv, &mut comm)?;
            model.logits(0..sequences, &mut comm)?;
            times.push(begin.elapsed().as_secs_f64());
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        if rank.index() == 0 {
            let median = times[ROUNDS / 2];
            let rate = (sequences * new) as f64 / median;
            println!("{name:18} {:8.2} ms {rate:8.0} tokens/s", median * 1e3);
        }
    }
    Ok(())
}

fn batch(sequences: usize, new: usize, context: usize) -> Batch {
    let blocks = (context + new).div_ceil(BLOCK_SIZE);
    let mut batch = Batch::new(1);
    for sequence in 0..sequences {
        let first = batch.tokens.len();
        batch.tokens.extend((0..new as u32).map(|token| 1000 + token * 7));
        batch.positions.extend(context as u32..(context + new) as u32);
        batch.spans.push(BatchSpan {
            rows: first..first + new,
            context_len: context + new,
            table: sequence * blocks..(sequence + 1) * blocks,
        });
        batch.tables[0].extend((0..blocks).map(|block| BlockId((sequence * blocks + block) as u32)));
        batch.output_rows.push(first + new - 1);
    }
    batch
}
