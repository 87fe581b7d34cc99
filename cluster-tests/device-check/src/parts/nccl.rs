//! The machine's NCCL through our binding, at one rank: sums at once and in a graph, in both types, an end in order
//! and an abort. What several ranks do needs several cards; that a communicator is made, that its work is in the stream
//! when the call returns, and that nothing hangs does not.
#![allow(unsafe_code)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use consort_kernels::{
    buffer::Plain,
    cuda::{
        device::DeviceBuffer,
        nccl::{Nccl, NcclCommunicator, NcclElement, NcclError},
        settings::Settings,
    },
    element::bf16,
};

use crate::{
    figures::{Figure, Goal, Row},
    session::{Noise, Session, WORK_LIMIT},
};

/// Elements of a sum: few, not a multiple of a vector, and many.
const LENGTHS: [usize; 3] = [1, 515, 2 << 20];
/// Replays of a graph, each over other numbers.
const REPLAYS: usize = 20;
/// NCCL looks at networks and cards when it is first used.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let library = match Nccl::open(&Settings::of_process()) {
        Ok(library) => library,
        Err(error @ NcclError::NotFound { .. }) => {
            return session.row(Row::without("library", error.to_string().replace('\n', " ")));
        }
        Err(error) => return Err(error.into()),
    };
    let started = Instant::now();
    let communicator = join(session, &library)?;
    let took = Figure::cost(started.elapsed().as_secs_f64(), "s");
    let file = library.file().display();
    session.row(Row::new("join", took).note(format!("NCCL {} at {file}", library.version())))?;
    let lengths = session.pick(LENGTHS, [1, 515, 4096]);
    sums::<f32>(session, &communicator, "F32", &lengths, |x| x)?;
    sums::<bf16>(session, &communicator, "BF16", &lengths, bf16::from_f32)?;
    let started = Instant::now();
    communicator.finish(WORK_LIMIT)?;
    session.row(Row::new("leave in order", Figure::cost(started.elapsed().as_secs_f64(), "s")))?;
    aborted(session, &library)
}

fn join(session: &Session, library: &Arc<Nccl>) -> Result<Arc<NcclCommunicator>> {
    let id = library.unique_id()?;
    let communicator = NcclCommunicator::begin(library, &session.device, &id, 0, 1)?;
    communicator.wait_until_ready(JOIN_LIMIT, &Vec::new)?;
    Ok(communicator)
}

/// The sum of one rank's part is that part, to the bit.
fn sums<T: NcclElement + Plain + Default + PartialEq>(
    session: &mut Session,
    communicator: &NcclCommunicator,
    name: &str,
    lengths: &[usize],
    of: impl Fn(f32) -> T,
) -> Result<()> {
    let (mut wrong, mut compared) = (0, 0);
    for &len in lengths {
        let device = session.device.clone();
        let mut from: DeviceBuffer<T> = session.buffer(len, "a part")?;
        let mut to: DeviceBuffer<T> = session.buffer(len, "a sum")?;
        let part = |seed: u64| Noise::new(seed).take(len).map(&of).collect::<Vec<T>>();
        let mut compare = |to: &DeviceBuffer<T>, expected: &[T]| -> Result<()> {
            let mut got = vec![T::default(); len];
            device.download(to.all(), &mut got, WORK_LIMIT)?;
            wrong += got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
            compared += len;
            Ok(())
        };
        device.upload(&part(0), from.all_mut())?;
        // SAFETY: the buffers outlive the sum, which the download waits for.
        unsafe { communicator.all_reduce(&*device, from.all(), to.all_mut())? };
        compare(&to, &part(0))?;
        // SAFETY: the buffers outlive the graph, which is gone before the communicator ends.
        let graph = device
            .capture(|launcher| unsafe { communicator.all_reduce(launcher, from.all(), to.all_mut()) })?;
        for seed in 1..=session.pick(REPLAYS, 3) as u64 {
            let values = part(seed);
            device.upload(&values, from.all_mut())?;
            device.launch_graph(&graph)?;
            compare(&to, &values)?;
        }
        communicator.check()?;
    }
    // Where nothing was compared, nothing is right.
    let wrong = if compared == 0 { 1 } else { wrong };
    let row = Row::new(format!("sums of {name}"), Figure::cost(wrong as f64, "wrong"));
    session.row(row.goal(Goal::required(0.0, "the part itself")).note(format!("of {compared} elements")))
}

/// A communicator that is aborted, once while it waits for a rank that never comes.
fn aborted(session: &mut Session, library: &Arc<Nccl>) -> Result<()> {
    join(session, library)?.abort("the check wants it so");
    let id = library.unique_id()?;
    let alone = NcclCommunicator::begin(library, &session.device, &id, 0, 2)?;
    let late = alone.wait_until_ready(Duration::from_millis(500), &|| vec![1]);
    ensure!(matches!(late, Err(NcclError::JoinTimeout { .. })), "rank 1 never came, and yet: {late:?}");
    let started = Instant::now();
    alone.abort("rank 1 never came");
    let took = Figure::cost(started.elapsed().as_secs_f64(), "s");
    let ended = alone.check();
    ensure!(matches!(ended, Err(NcclError::Ended { .. })), "it was aborted, and yet: {ended:?}");
    // The device takes work as before.
    let mut buffer: DeviceBuffer<f32> = session.buffer(4, "after an abort")?;
    session.device.upload(&[1.0, 2.0, 3.0, 4.0], buffer.all_mut())?;
    let mut got = [0.0f32; 4];
    session.device.download(buffer.all(), &mut got, WORK_LIMIT)?;
    ensure!(got == [1.0, 2.0, 3.0, 4.0], "after an abort the device gives {got:?}");
    session.row(Row::new("abort of a join", took).goal(Goal::hoped(10.0, "a supervisor's patience")))
}
