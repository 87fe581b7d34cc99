//! Ranks of one process on one card: a stream and memory for each, which the others read.
#![allow(unsafe_code)]

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use anyhow::{Result, bail};
use consort_kernels::{
    KernelError,
    all_reduce::cuda::{
        AREA_WORDS, PeerAddresses, Peers, STOP_WORDS, Stopped, all_gather_peers, all_reduce_one_shot,
        all_reduce_rms_norm, all_reduce_two_shot,
    },
    cuda::{
        Launcher,
        device::{ArenaPlan, CudaDevice, DeviceBuffer, Graph, HostWords, Selector},
        settings::Settings,
    },
};
use half::bf16;

use crate::session::Session;

/// Longest wait for a rank.
const LIMIT: Duration = Duration::from_secs(5);
/// The same before memory is given back: waits end by themselves about then.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Polls until a rank is taken to be lost: some two seconds.
const POLLS_MAX: u32 = 4_000_000;
pub(super) const EPS: f32 = 1e-5;

/// A way to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    OneShot,
    TwoShots,
    /// With the norm, of rows as wide.
    Fused {
        width: usize,
    },
    /// No sum: rows as wide of all ranks, side by side.
    Gather {
        width: usize,
    },
}

impl Operation {
    /// Of each kernel one, small.
    const ALL: [Operation; 4] = [
        Operation::OneShot,
        Operation::TwoShots,
        Operation::Fused { width: 64 },
        Operation::Gather { width: 64 },
    ];
}

/// All of them.
pub(super) struct Ranks {
    ranks: Vec<Rank>,
    /// A rank leaves its waits when its word is set.
    aborts: Vec<HostWords>,
}

/// One of them.
pub(super) struct Rank {
    pub(super) device: Arc<CudaDevice>,
    peers: Peers,
    /// What the others read.
    pub(super) part: DeviceBuffer<f32>,
    pub(super) sum: DeviceBuffer<f32>,
    pub(super) residual: DeviceBuffer<f32>,
    pub(super) weight: DeviceBuffer<f32>,
    pub(super) normed: DeviceBuffer<bf16>,
    area: DeviceBuffer<u32>,
}

impl Ranks {
    /// `count` ranks with up to `capacity` elements each. Whatever a driver does at the first launch of a kernel may
    /// wait for all of the card, and so for ranks that wait for this one: so all kernels have run before any two meet.
    pub(super) fn new(session: &Session, count: usize, capacity: usize) -> Result<Ranks> {
        let selector: Selector = "cuda:0".parse()?;
        let mut devices = vec![session.device.clone()];
        while devices.len() < count {
            devices.push(CudaDevice::open(&selector, &Settings::of_process())?);
        }
        let mut ranks = Vec::with_capacity(count);
        let mut aborts = Vec::with_capacity(count);
        for device in devices {
            device.load_all()?;
            let abort = HostWords::new(&device, 1)?;
            ranks.push(Rank::alone(device, capacity, count, &abort)?);
            aborts.push(abort);
        }
        for rank in &mut ranks {
            for operation in Operation::ALL {
                let device = rank.device.clone();
                rank.enqueue(device.as_ref(), operation, 64)?;
                device.measure(LIMIT, || rank.enqueue(device.as_ref(), operation, 64))?;
            }
            rank.device.zero(rank.area.all_mut())?;
            rank.device.synchronize("end what it did alone", LIMIT)?;
        }
        let addresses: Vec<PeerAddresses> = ranks.iter().map(Rank::addresses).collect();
        // A kernel with the norm has a multiprocessor to itself: all of all ranks must fit side by side.
        let multiprocessors = session.device.multiprocessors() / count as u32;
        for (at, (rank, abort)) in ranks.iter_mut().zip(&aborts).enumerate() {
            // SAFETY: the memory is this process's own and on the same card; it lives in `Ranks`, which waits for all
            // devices before it is dropped. `together` has every rank launch the same; between two operations each
            // rank's launches have ended before its part is written.
            let peers =
                unsafe { Peers::new(at, &addresses, capacity, abort.address(0), multiprocessors.max(1))? };
            rank.peers = peers.with_polls_max(POLLS_MAX);
        }
        Ok(Ranks { ranks, aborts })
    }

    /// Each rank by itself, one after another: nothing that waits for others.
    pub(super) fn each<T>(&mut self, work: impl FnMut(&mut Rank) -> Result<T>) -> Result<Vec<T>> {
        self.ranks.iter_mut().map(work).collect()
    }

    /// The same work on every rank at the same time, and its end. An error of one ends the waits of the others.
    pub(super) fn together<T: Send>(
        &mut self,
        work: impl Fn(&mut Rank) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (start, aborts, work) = (Barrier::new(self.ranks.len()), &self.aborts, &work);
        let run = |rank: &mut Rank| {
            start.wait();
            let done = work(rank).and_then(|done| {
                rank.device.synchronize("add over ranks", LIMIT)?;
                Ok(done)
            });
            if done.is_err() {
                aborts.iter().for_each(|abort| abort.set(0, 1));
            }
            done
        };
        let run = &run;
        let ended: Vec<thread::Result<Result<T>>> = thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter_mut().map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let mut done = Vec::with_capacity(ended.len());
        for ended in ended {
            match ended {
                Ok(ended) => done.push(ended?),
                Err(_) => bail!("the thread of a rank panicked"),
            }
        }
        for (at, rank) in self.ranks.iter().enumerate() {
            if let Some(stopped) = rank.stopped()? {
                bail!("rank {at} did not get to the end of a sum: {stopped:?}");
            }
        }
        Ok(done)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // No rank gives its memory back while another may read it; one that waits in vain ends by its limit of polls.
        let doing = "end its part of a sum";
        let ended = |rank: &Rank| rank.device.synchronize(doing, END_LIMIT).is_ok();
        if !self.ranks.iter().all(ended) {
            self.ranks.iter().for_each(|rank| rank.device.abandon(doing));
        }
    }
}

impl Rank {
    /// A group of one, with room for what so many have.
    fn alone(device: Arc<CudaDevice>, capacity: usize, ranks: usize, abort: &HostWords) -> Result<Rank> {
        let mut plan = ArenaPlan::new();
        let [part, residual, weight] =
            ["parts", "residuals", "weights"].map(|what| plan.reserve::<f32>(capacity, what));
        let sum = plan.reserve::<f32>(capacity * ranks, "sums, or all parts");
        let normed = plan.reserve::<bf16>(capacity, "normalised rows");
        let area = plan.reserve::<u32>(AREA_WORDS, "what ranks meet in");
        let arena = plan.allocate(&device)?;
        let (part, area) = (arena.buffer(part), arena.buffer(area));
        let own = PeerAddresses { buffer: part.address(), area: area.address() };
        // SAFETY: its own memory, which it keeps; it waits for nobody.
        let peers = unsafe { Peers::new(0, &[own], capacity, abort.address(0), 1)? };
        Ok(Rank {
            peers,
            part,
            sum: arena.buffer(sum),
            residual: arena.buffer(residual),
            weight: arena.buffer(weight),
            normed: arena.buffer(normed),
            area,
            device,
        })
    }

    /// Which one it is.
    pub(super) fn index(&self) -> usize {
        self.peers.rank()
    }

    fn addresses(&self) -> PeerAddresses {
        PeerAddresses { buffer: self.part.address(), area: self.area.address() }
    }

    /// Enqueues one sum of `len` elements.
    pub(super) fn enqueue(
        &mut self,
        launcher: &dyn Launcher,
        operation: Operation,
        len: usize,
    ) -> Result<(), KernelError> {
        let peers = &self.peers;
        match operation {
            Operation::OneShot => all_reduce_one_shot(launcher, peers, self.sum.slice_mut(0..len)),
            Operation::TwoShots => all_reduce_two_shot(launcher, peers, self.sum.slice_mut(0..len)),
            Operation::Fused { width } => {
                let (residual, normed) = (self.residual.slice_mut(0..len), self.normed.slice_mut(0..len));
                all_reduce_rms_norm(launcher, peers, residual, self.weight.slice(0..width), EPS, normed)
            }
            Operation::Gather { width } => {
                let (rows, widths) = (len / width, vec![width; peers.count()]);
                all_gather_peers(launcher, peers, rows, &widths, self.sum.slice_mut(0..len * peers.count()))
            }
        }
    }

    /// So many sums in a graph, which is ready when this returns.
    pub(super) fn record(&mut self, operation: Operation, len: usize, times: usize) -> Result<Graph> {
        let device = self.device.clone();
        let graph =
            device.capture(|launcher| (0..times).try_for_each(|_| self.enqueue(launcher, operation, len)))?;
        device.synchronize("make a graph ready", LIMIT)?;
        Ok(graph)
    }

    /// Seconds of a replay that comes after another, so that no rank begins before the others.
    pub(super) fn seconds(&self, graph: &Graph) -> Result<f64> {
        self.device.launch_graph(graph)?;
        let took = self.device.measure(LIMIT, || Ok(self.device.launch_graph(graph)?))?;
        Ok(took.as_secs_f64())
    }

    fn stopped(&self) -> Result<Option<Stopped>> {
        let mut words = [0; STOP_WORDS];
        self.device.download(self.area.slice(AREA_WORDS - STOP_WORDS..AREA_WORDS), &mut words, LIMIT)?;
        Ok(Stopped::of_words(words))
    }
}
