//! Operations of the CPU one by one: how fast, and what share of what this machine can do.
use std::time::Instant;

use consort_kernels::{
    buffer::ViewMut,
    device::Device,
    element::bf16,
    linear::{Rows, Weight, linear, linear_swiglu},
};

fn main() {
    let threads = std::env::args().nth(1).and_then(|x| x.parse().ok()).unwrap_or(2);
    let device = Device::cpu(threads).expect("a device");
    for rows in [1usize, 8, 32, 128, 512] {
        for (inputs, outputs) in [(576usize, 960usize), (576, 576), (1536, 576), (576, 3072)] {
            let values: Vec<f32> =
                (0..rows * inputs).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5).collect();
            let x = Rows::<bf16>::of(&device, &values, inputs).expect("room");
            let mut weights = Vec::new();
            let copies = if rows <= 32 { 64 } else { 8 };
            for _ in 0..copies {
                let mut weight = if outputs == 3072 {
                    Weight::<bf16>::paired(&device, outputs / 2, inputs, "w").expect("room")
                } else {
                    Weight::<bf16>::zeros(&device, outputs, inputs, "w").expect("room")
                };
                weight
                    .fill(&device, |_, v| {
                        v.iter_mut().enumerate().for_each(|(i, v)| *v = (i % 101) as f32 / 101.0 - 0.5);
                        Ok::<(), ()>(())
                    })
                    .expect("filled");
                weights.push(weight);
            }
            let mut y = vec![0.0f32; rows * outputs];
            let mut out = Rows::<bf16>::zeros(&device, rows, outputs / 2, "out").expect("room");
            let mut times = Vec::new();
            for _ in 0..60 {
                let begin = Instant::now();
                for weight in &weights {
                    if outputs == 3072 {
                        linear_swiglu(&device, x.view(rows), weight, out.view_mut(rows)).expect("fits");
                    } else {
                        linear(&device, x.view(rows), weight, ViewMut::from(&mut y[..])).expect("fits");
                    }
                }
                times.push(begin.elapsed().as_secs_f64() / copies as f64);
            }
            times.sort_by(f64::total_cmp);
            let t = times[times.len() / 2];
            println!(
                "{rows:4} x {inputs} x {outputs}: {:8.1} us {:6.1} GB/s {:7.0} GFLOP/s",
                t * 1e6,
                (inputs * outputs * 2) as f64 / t / 1e9,
                (2 * rows * inputs * outputs) as f64 / t / 1e9
            );
        }
    }
}
