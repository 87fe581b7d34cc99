//! The CPU's operations one by one, on shapes of SmolLM2-135M and of an 8B Llama: what each costs, and what share of
//! what this machine can do.
//!
//! `cargo bench -p consort-kernels --bench ops [-- THREADS]`. Ceilings are measured first: memory that all threads read
//! together, and products of registers. A product of few rows is bound by its weights, which are more here than any
//! cache holds; one of many by multiplications. Figures are medians; on a shared machine compare those of one run.
//! `--test` runs a short pass.

#![expect(clippy::print_stdout, reason = "a bench prints its tables")]

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use consort_kernels::{
    KernelError,
    attention::{AttentionShape, PagedCache, PagedSpan, attention},
    buffer::{Buffer, View, ViewMut},
    device::Device,
    element::bf16,
    kv_append::PageShape,
    linear::{Rows, Weight, linear, linear_add, linear_swiglu, peak_flops},
    rms_norm::rms_norm,
    rope::Heads,
};

/// Weights that no cache holds: copies of a matrix are used in turn until they are so many bytes.
const COLD_BYTES: usize = 512 << 20;

/// What a machine can do.
struct Ceilings {
    bytes_per_s: f64,
    flops: f64,
}

struct Bench {
    device: Device,
    rounds: usize,
    ceilings: Ceilings,
}

fn main() -> Result<(), KernelError> {
    let is_short = std::env::args().any(|argument| argument == "--test");
    let threads = std::env::args().filter_map(|argument| argument.parse().ok()).next();
    let threads = threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let device = Device::cpu(threads)?;
    let time = Duration::from_millis(if is_short { 20 } else { 1000 });
    let ceilings = Ceilings {
        bytes_per_s: read_speed(&device, threads, time)?,
        flops: peak_flops::<bf16>(&device, time)?,
    };
    println!(
        "{threads} threads, bfloat16; reading {:.1} GB/s, multiplying {:.0} GFLOP/s from registers\n",
        ceilings.bytes_per_s / 1e9,
        ceilings.flops / 1e9
    );
    let bench = Bench { device, rounds: if is_short { 1 } else { 15 }, ceilings };
    println!("| operation | rows | time | GB/s | of reading | GFLOP/s | of multiplying |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    let row_counts: &[usize] = if is_short { &[1, 40] } else { &[1, 8, 32, 128, 512] };
    for &rows in row_counts {
        for (hidden, qkv, columns) in [(576, 960, 1536), (4096, 6144, 14336)] {
            if is_short && hidden > 576 {
                continue;
            }
            bench.product("qkv", rows, hidden, qkv)?;
            bench.gates(rows, hidden, columns)?;
            bench.product("down", rows, columns, hidden)?;
            bench.norm(rows, hidden)?;
        }
    }
    for (sequences, rows, context) in
        [(1, 1, 128), (1, 1, 4096), (32, 1, 1024), (1, 512, 512), (1, 512, 2048)]
    {
        if is_short && context > 600 {
            continue;
        }
        bench.attention(sequences, rows, context)?;
    }
    Ok(())
}

/// Bytes a second that all threads read together, of memory that no cache holds.
fn read_speed(device: &Device, threads: usize, time: Duration) -> Result<f64, KernelError> {
    let mut memory = Buffer::<f32>::zeros(device, COLD_BYTES / size_of::<f32>(), "memory to read")?;
    // The system gives pages when they are first written; until then all are one page of zeros.
    memory.as_mut_slice().fill(1.0);
    let part = memory.len() / threads;
    let mut best = 0.0f64;
    let begin = Instant::now();
    while begin.elapsed() < time || best == 0.0 {
        let round = Instant::now();
        thread::scope(|scope| {
            for values in memory.as_slice().chunks_exact(part) {
                scope.spawn(move || {
                    let mut sums = [0.0f32; 64];
                    for chunk in values.as_chunks::<64>().0 {
                        sums.iter_mut().zip(chunk).for_each(|(sum, value)| *sum += value);
                    }
                    black_box(sums)
                });
            }
        });
        best = best.max((part * threads * size_of::<f32>()) as f64 / round.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|at| (at * 7919 % 1009) as f32 / 1009.0 - 0.5).collect()
}

impl Bench {
    /// Prints a row: medians of `job(copy)` for `copies` in turn, each of which reads `bytes` and computes `flop`.
    fn row(
        &self,
        name: &str,
        rows: usize,
        copies: usize,
        (bytes, flop): (f64, f64),
        mut job: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let mut times = Vec::with_capacity(self.rounds);
        for round in 0..=self.rounds {
            let begin = Instant::now();
            for copy in 0..copies {
                job(copy)?;
            }
            if round > 0 {
                times.push(begin.elapsed().as_secs_f64() / copies as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        let time = times[times.len() / 2];
        let (bytes, flop) = (bytes / time, flop / time);
        println!(
            "| {name} | {rows} | {:.1} us | {:.1} | {:.0} % | {:.0} | {:.0} % |",
            time * 1e6,
            bytes / 1e9,
            100.0 * bytes / self.ceilings.bytes_per_s,
            flop / 1e9,
            100.0 * flop / self.ceilings.flops
        );
        Ok(())
    }

    /// As many copies as no cache holds.
    fn copies(
        &self,
        make: impl Fn() -> Result<Weight<bf16>, KernelError>,
    ) -> Result<Vec<Weight<bf16>>, KernelError> {
        let first = make()?;
        let wanted = if self.rounds > 1 { COLD_BYTES } else { 1 };
        let copies = wanted.div_ceil(first.bytes() as usize).max(1);
        let mut all = vec![first];
        while all.len() < copies {
            all.push(make()?);
        }
        for weight in &mut all {
            let fill = |_: std::ops::Range<usize>, values: &mut [f32]| {
                values
                    .iter_mut()
                    .enumerate()
                    .for_each(|(at, value)| *value = (at % 101) as f32 / 101.0 - 0.5);
                Ok::<(), KernelError>(())
            };
            weight.fill(&self.device, fill)?;
        }
        Ok(all)
    }

    fn product(&self, name: &str, rows: usize, inputs: usize, outputs: usize) -> Result<(), KernelError> {
        let x = Rows::<bf16>::of(&self.device, &numbers(rows * inputs), inputs)?;
        let weights = self.copies(|| Weight::zeros(&self.device, outputs, inputs, "weights"))?;
        let mut y = vec![0.0; rows * outputs];
        let work = work(rows, inputs, outputs);
        self.row(&format!("{name} {inputs} x {outputs}"), rows, weights.len(), work, |copy| match name {
            "down" => linear_add(&self.device, x.view(rows), &weights[copy], ViewMut::from(&mut y[..])),
            _ => linear(&self.device, x.view(rows), &weights[copy], ViewMut::from(&mut y[..])),
        })
    }

    fn gates(&self, rows: usize, inputs: usize, width: usize) -> Result<(), KernelError> {
        let x = Rows::<bf16>::of(&self.device, &numbers(rows * inputs), inputs)?;
        let weights = self.copies(|| Weight::paired(&self.device, width, inputs, "gates and ups"))?;
        let mut out = Rows::<bf16>::zeros(&self.device, rows, width, "gated")?;
        let name = format!("gates {inputs} x 2 x {width}");
        self.row(&name, rows, weights.len(), work(rows, inputs, 2 * width), |copy| {
            linear_swiglu(&self.device, x.view(rows), &weights[copy], out.view_mut(rows))
        })
    }

    fn norm(&self, rows: usize, width: usize) -> Result<(), KernelError> {
        let (mut residual, weight) = (numbers(rows * width), numbers(width));
        let mut out = Rows::<bf16>::zeros(&self.device, rows, width, "normalised")?;
        let bytes = (rows * width * (4 + 2)) as f64;
        self.row(&format!("rms_norm {width}"), rows, 20, (bytes, 0.0), |_| {
            let (residual, weight) = (ViewMut::from(&mut residual[..]), View::from(&weight[..]));
            rms_norm(&self.device, residual, None, weight, 1e-5, out.view_mut(rows))
        })
    }

    /// Nine heads over three of 64, as SmolLM2-135M has them.
    fn attention(&self, sequences: usize, rows: usize, context: usize) -> Result<(), KernelError> {
        let (dim, heads, kv_heads, block) = (64, 9, 3, 16);
        let pages = PageShape::new(block, kv_heads, dim)?;
        let blocks = context.div_ceil(block);
        // Layers, so that no cache holds the keys of a decode.
        let layers = if self.rounds > 1 { 8 } else { 1 };
        let elements = sequences * blocks * pages.page_elements();
        let keys: Vec<Vec<bf16>> =
            (0..layers).map(|_| numbers(elements).into_iter().map(bf16::from_f32).collect()).collect();
        let tables: Vec<u32> = (0..(sequences * blocks) as u32).collect();
        let spans: Vec<PagedSpan> = (0..sequences)
            .map(|at| PagedSpan {
                rows: at * rows..(at + 1) * rows,
                context_len: context,
                table: at * blocks..(at + 1) * blocks,
            })
            .collect();
        let shape = AttentionShape {
            pages,
            kv_of_query: (0..heads).map(|head| head / (heads / kv_heads)).collect(),
            scale: 0.125,
            window: None,
        };
        let all = sequences * rows;
        let queries = numbers(all * heads * dim);
        let heads = Heads { stride: heads * dim, first: 0, count: heads, dim };
        let mut out = Rows::<bf16>::zeros(&self.device, all, heads.count * dim, "attended")?;
        // Each row sees the keys up to its own.
        let seen = (sequences * rows * context - sequences * rows * (rows - 1) / 2) as f64;
        let bytes = (sequences * context * kv_heads * dim * 2 * 2) as f64;
        let flop = seen * (heads.count * dim * 4) as f64;
        let name = format!("attention, {sequences} x {rows} behind {}", context - rows);
        self.row(&name, all, layers, (bytes, flop), |layer| {
            let cache = PagedCache { pages: View::from(&keys[layer][..]), tables: &tables, spans: &spans };
            attention(&self.device, View::from(&queries[..]), heads, &shape, cache, out.view_mut(all))
        })
    }
}

/// Bytes of weights and operations of a product.
fn work(rows: usize, inputs: usize, outputs: usize) -> (f64, f64) {
    ((inputs * outputs * 2) as f64, (2 * rows * inputs * outputs) as f64)
}
