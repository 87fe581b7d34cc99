//! Ranks over the software driver's NCCL, in processes of their own.

mod ends;
mod library;
mod processes;
mod sums;

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use consort_software_driver::{Report, in_child_reported};

use super::*;
use crate::{
    buffer::Plain,
    cuda::{
        device::{ArenaPlan, CudaDevice, DeviceBuffer},
        settings::Settings,
    },
    element::bf16,
    testing::Numbers,
};

/// Enough for any work here, on a machine that does other things, too.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `body` over as many devices with variables of its own; what the driver reports exists in the parent only.
fn report_of(
    module: &str,
    test: &str,
    devices: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&Settings),
) -> Option<Report> {
    let module = module.split_once("::").map_or(module, |(_, module)| module);
    let mut environment = vec![("CONSORT_SOFTWARE_DRIVER_DEVICES", devices)];
    environment.extend(variables);
    in_child_reported(&format!("{module}::{test}"), &environment, || body(&Settings::of_process()))
}

/// The same, and holds the report to this: nothing was done in a wrong order, and everything was given back.
fn over_devices(
    module: &str,
    test: &str,
    devices: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&Settings),
) {
    if let Some(report) = report_of(module, test, devices, variables, body) {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
    }
}

fn open(settings: &Settings, ordinal: usize) -> Arc<CudaDevice> {
    let selector = format!("cuda:{ordinal}").parse().expect("a selector");
    CudaDevice::open(&selector, settings).unwrap_or_else(|error| panic!("{error}"))
}

/// One rank with its device, for the body of a thread.
struct Member {
    device: Arc<CudaDevice>,
    communicator: Arc<NcclCommunicator>,
    /// All ranks of the process.
    together: Arc<Barrier>,
}

/// Runs `body` on a thread for each rank, whose communicators are complete.
fn with_ranks<T: Send>(settings: &Settings, ranks: usize, body: impl Fn(&Member) -> T + Sync) -> Vec<T> {
    let library = Nccl::open(settings).unwrap();
    let id = library.unique_id().unwrap();
    let together = Arc::new(Barrier::new(ranks));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (library, together, body) = (library.clone(), together.clone(), &body);
                scope.spawn(move || {
                    let device = open(settings, rank);
                    let communicator = NcclCommunicator::begin(&library, &device, &id, rank, ranks).unwrap();
                    communicator.wait_until_ready(LIMIT, &Vec::new).unwrap();
                    body(&Member { device, communicator, together })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// Memory of a device: `from`, filled, and `to`.
fn buffers<T: Plain + Default>(
    device: &Arc<CudaDevice>,
    from: &[T],
    to: usize,
) -> (DeviceBuffer<T>, DeviceBuffer<T>) {
    let mut plan = ArenaPlan::new();
    let reserved = (plan.reserve(from.len(), "what a rank gives"), plan.reserve(to, "what it gets"));
    let arena = plan.allocate(device).unwrap();
    let (mut given, got) = (arena.buffer(reserved.0), arena.buffer(reserved.1));
    device.upload(from, given.all_mut()).unwrap();
    (given, got)
}

fn read<T: Plain + Default>(device: &CudaDevice, buffer: &DeviceBuffer<T>) -> Vec<T> {
    let mut values = vec![T::default(); buffer.len()];
    device.download(buffer.all(), &mut values, LIMIT).unwrap();
    values
}

/// What a rank gives in a round.
fn part(rank: usize, round: usize, len: usize) -> Vec<f32> {
    Numbers((rank * 1000 + round) as u64).vec(len)
}

/// The sum of all ranks' parts, from the first to the last.
fn sum(ranks: usize, round: usize, len: usize) -> Vec<f32> {
    let mut total = part(0, round, len);
    for rank in 1..ranks {
        total.iter_mut().zip(part(rank, round, len)).for_each(|(total, x)| *total += x);
    }
    total
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

/// The same of BF16, rounded after each addition.
fn rounded_sum(ranks: usize, round: usize, len: usize) -> Vec<bf16> {
    let mut total = rounded(&part(0, round, len));
    for rank in 1..ranks {
        let others = rounded(&part(rank, round, len));
        let add = |(total, x): (&mut bf16, bf16)| *total = bf16::from_f32(total.to_f32() + x.to_f32());
        total.iter_mut().zip(others).for_each(add);
    }
    total
}
