//! The CPU's operations one by one, on shapes of SmolLM2-135M and of an 8B Llama: what each costs, and what share of
//! what this machine can do.
//!
//! `cargo bench -p consort-kernels --bench ops [-- FILTER]`, with as many threads as cores, or `CONSORT_BENCH_THREADS`.
//! Ceilings are measured first: memory that all threads read together, and products of registers. A product of few rows
//! is bound by its weights, which are more here than any cache holds; one of many by multiplications. On a shared
//! machine compare figures of one run.

#![expect(clippy::print_stdout, reason = "a bench tells what the machine does")]

use std::time::{Duration, Instant};

use consort_kernels::{
    KernelError,
    attention::{AttentionShape, PagedCache, PagedSpan, attention},
    buffer::{View, ViewMut},
    ceilings::{peak_flops, read_speed},
    device::Device,
    element::bf16,
    kv_append::PageShape,
    linear::{Rows, Weight, linear, linear_add, linear_swiglu},
    rms_norm::rms_norm,
    rope::Heads,
};
use criterion::{
    Criterion, Throughput,
    measurement::{Measurement, ValueFormatter, WallTime},
};

/// Weights that no cache holds: copies of a matrix are used in turn until they are so many bytes.
const COLD_BYTES: usize = 512 << 20;

/// Time, and what was done in it as a share of what this machine does at most.
struct OfMachine {
    bytes_per_s: f64,
    flops: f64,
}

impl Measurement for OfMachine {
    type Intermediate = Instant;
    type Value = Duration;

    fn start(&self) -> Instant {
        WallTime.start()
    }

    fn end(&self, begun: Instant) -> Duration {
        WallTime.end(begun)
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        WallTime.add(a, b)
    }

    fn zero(&self) -> Duration {
        WallTime.zero()
    }

    fn to_f64(&self, time: &Duration) -> f64 {
        WallTime.to_f64(time)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for OfMachine {
    fn format_throughput(&self, throughput: &Throughput, ns: f64) -> String {
        let read = |bytes: u64| {
            let speed = bytes as f64 / ns * 1e9;
            format!("{:.1} GB/s ({:.0} %)", speed / 1e9, 100.0 * speed / self.bytes_per_s)
        };
        let multiplied = |operations: u64| {
            let speed = operations as f64 / ns * 1e9;
            format!("{:.0} GFLOP/s ({:.0} %)", speed / 1e9, 100.0 * speed / self.flops)
        };
        match *throughput {
            Throughput::Bytes(bytes) => read(bytes),
            Throughput::Elements(operations) => multiplied(operations),
            Throughput::ElementsAndBytes { elements, bytes } => {
                format!("{}, {}", read(bytes), multiplied(elements))
            }
            _ => WallTime.formatter().format_throughput(throughput, ns),
        }
    }

    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(&self, typical: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_throughputs(typical, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}

struct Bench {
    device: Device,
    criterion: Criterion<OfMachine>,
    /// Everything once, without a measurement.
    is_test: bool,
}

fn main() -> Result<(), KernelError> {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let threads = std::env::var("CONSORT_BENCH_THREADS").ok().and_then(|threads| threads.parse().ok());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let device = Device::cpu(threads)?;
    let time = Duration::from_millis(if is_test { 20 } else { 1000 });
    let machine = OfMachine {
        bytes_per_s: read_speed(&device, if is_test { 1 << 20 } else { COLD_BYTES }, time)?,
        flops: peak_flops::<bf16>(&device, time)?,
    };
    println!(
        "{threads} threads, bfloat16; at most {:.1} GB/s are read and {:.0} GFLOP/s multiplied from registers\n",
        machine.bytes_per_s / 1e9,
        machine.flops / 1e9
    );
    let criterion = Criterion::default()
        .sample_size(15)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .with_measurement(machine)
        .configure_from_args();
    let mut bench = Bench { device, criterion, is_test };
    for rows in [1, 8, 32, 128, 512] {
        for (hidden, qkv, columns) in [(576, 960, 1536), (4096, 6144, 14336)] {
            if is_test && (hidden > 576 || rows > 32) {
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
        if !is_test || context < 600 {
            bench.attention(sequences, rows, context)?;
        }
    }
    bench.criterion.final_summary();
    Ok(())
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|at| (at * 7919 % 1009) as f32 / 1009.0 - 0.5).collect()
}

impl Bench {
    /// Measures `job(copy)` for `copies` in turn, each of which reads `bytes` and computes `flop`.
    fn measure(
        &mut self,
        name: &str,
        rows: usize,
        copies: usize,
        (bytes, flop): (usize, usize),
        mut job: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let mut outcome = Ok(());
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(match flop {
            0 => Throughput::Bytes(bytes as u64),
            flop => Throughput::ElementsAndBytes { elements: flop as u64, bytes: bytes as u64 },
        });
        group.bench_function(format!("{rows} rows"), |bencher| {
            let mut copy = 0;
            bencher.iter(|| {
                if let Err(error) = job(copy) {
                    outcome = Err(error);
                }
                copy = (copy + 1) % copies;
            });
        });
        group.finish();
        outcome
    }

    /// As many copies as no cache holds.
    fn copies(
        &self,
        make: impl Fn() -> Result<Weight<bf16>, KernelError>,
    ) -> Result<Vec<Weight<bf16>>, KernelError> {
        let first = make()?;
        let wanted = if self.is_test { 1 } else { COLD_BYTES };
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

    fn product(&mut self, name: &str, rows: usize, inputs: usize, outputs: usize) -> Result<(), KernelError> {
        let device = self.device.clone();
        let x = Rows::<bf16>::of(&device, &numbers(rows * inputs), inputs)?;
        let weights = self.copies(|| Weight::zeros(&device, outputs, inputs, "weights"))?;
        let mut y = vec![0.0; rows * outputs];
        let work = work(rows, inputs, outputs);
        self.measure(&format!("{name} {inputs} x {outputs}"), rows, weights.len(), work, |copy| match name {
            "down" => linear_add(&device, x.view(rows), &weights[copy], ViewMut::from(&mut y[..])),
            _ => linear(&device, x.view(rows), &weights[copy], ViewMut::from(&mut y[..])),
        })
    }

    fn gates(&mut self, rows: usize, inputs: usize, width: usize) -> Result<(), KernelError> {
        let device = self.device.clone();
        let x = Rows::<bf16>::of(&device, &numbers(rows * inputs), inputs)?;
        let weights = self.copies(|| Weight::paired(&device, width, inputs, "gates and ups"))?;
        let mut out = Rows::<bf16>::zeros(&device, rows, width, "gated")?;
        let name = format!("gates {inputs} x 2 x {width}");
        self.measure(&name, rows, weights.len(), work(rows, inputs, 2 * width), |copy| {
            linear_swiglu(&device, x.view(rows), &weights[copy], out.view_mut(rows))
        })
    }

    fn norm(&mut self, rows: usize, width: usize) -> Result<(), KernelError> {
        let device = self.device.clone();
        let (mut residual, weight) = (numbers(rows * width), numbers(width));
        let mut out = Rows::<bf16>::zeros(&device, rows, width, "normalised")?;
        let bytes = rows * width * (4 + 2);
        self.measure(&format!("rms_norm {width}"), rows, 1, (bytes, 0), |_| {
            let (residual, weight) = (ViewMut::from(&mut residual[..]), View::from(&weight[..]));
            rms_norm(&device, residual, None, weight, 1e-5, out.view_mut(rows))
        })
    }

    /// Nine heads over three of 64, as SmolLM2-135M has them.
    fn attention(&mut self, sequences: usize, rows: usize, context: usize) -> Result<(), KernelError> {
        let device = self.device.clone();
        let (dim, heads, kv_heads, block) = (64, 9, 3, 16);
        let pages = PageShape::new(block, kv_heads, dim)?;
        let blocks = context.div_ceil(block);
        // Layers, so that no cache holds the keys of a decode.
        let layers = if self.is_test { 1 } else { 8 };
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
        let mut out = Rows::<bf16>::zeros(&device, all, heads.count * dim, "attended")?;
        // Each row sees the keys up to its own.
        let seen = sequences * rows * context - sequences * rows * (rows - 1) / 2;
        let bytes = sequences * context * kv_heads * dim * 2 * 2;
        let flop = seen * heads.count * dim * 4;
        let name = format!("attention, {sequences} x {rows} behind {}", context - rows);
        self.measure(&name, all, layers, (bytes, flop), |layer| {
            let cache = PagedCache { pages: View::from(&keys[layer][..]), tables: &tables, spans: &spans };
            attention(&device, View::from(&queries[..]), heads, &shape, cache, out.view_mut(all))
        })
    }
}

/// Bytes of weights and operations of a product.
fn work(rows: usize, inputs: usize, outputs: usize) -> (usize, usize) {
    (inputs * outputs * 2, 2 * rows * inputs * outputs)
}
