//! A rank that is a process and adds with our kernels, over memory that it maps of the others and they of it: by every
//! way of a sum, enqueued and replayed from a graph. Then a sum to which a rank does not come, and what is left of that
//! rank's memory.
#![allow(unsafe_code)]

use std::{os::fd::AsFd, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use consort_kernels::{
    KernelError,
    all_reduce::{
        all_reduce_reference,
        cuda::{AREA_WORDS, PeerAddresses, Peers, STOP_WORDS, Stopped, Way, Why, all_reduce_by},
    },
    cuda::{
        DeviceSlice, Launcher,
        device::{ArenaPlan, CudaDevice, DeviceBuffer, Graph, HostWords, PeerMemory},
    },
};
use consort_parallel::{
    collective::{Collective, SharedMemory},
    ids::Rank,
};
use serde::{Deserialize, Serialize};

use crate::{figures::Compared, parts::all_reduce::numbers, session::Size};

/// Both are gone through whichever the product would choose.
pub(super) const WAYS: [Way; 2] = [Way::OneShot, Way::TwoShots];
/// Elements of a sum: fewer than there are blocks, an odd number, and more than one shot is meant for.
const LENGTHS: [usize; 4] = [7, 515, 64 << 10, 512 << 10];
const LENGTHS_SMALL: [usize; 3] = [7, 515, 4096];
/// Sums of a length and way, each of other numbers. The first one is enqueued, the others are replays.
const TURNS: usize = 4;
/// Longest wait for the device. Ranks on one card have it in turns of milliseconds, and meet three times in a sum.
const LIMIT: Duration = Duration::from_secs(5);

/// A rank at work.
pub(super) struct Adder {
    device: Arc<CudaDevice>,
    peers: Peers,
    /// What each rank adds, from which each turn takes other numbers.
    numbers: Vec<Vec<f32>>,
    lengths: &'static [usize],
    /// What the others read.
    part: DeviceBuffer<f32>,
    area: DeviceBuffer<u32>,
    source: DeviceBuffer<f32>,
    sum: DeviceBuffer<f32>,
    /// Of the other ranks, by rank.
    memories: Vec<Option<PeerMemory>>,
    /// Where the part is in the memory of each.
    place: u64,
    /// Ends this rank's waits.
    abort: Arc<HostWords>,
    // Last: a rank that leaves its place ends the group.
    comm: SharedMemory,
}

/// What a rank says that was left by another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outlived {
    /// How its sum ended.
    pub(super) error: String,
    /// The other's part.
    pub(super) memory: Compared,
}

impl Adder {
    /// Takes memory, gives it to the others and maps theirs.
    pub(super) fn meet(mut comm: SharedMemory, device: Arc<CudaDevice>, size: Size) -> Result<Adder> {
        device.load_all()?;
        let lengths: &[usize] = if size == Size::Full { &LENGTHS } else { &LENGTHS_SMALL };
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let (mut own, mut shared) = (ArenaPlan::new(), ArenaPlan::new());
        let (source, sum) = (own.reserve(longest + TURNS, "what is summed"), own.reserve(longest, "sums"));
        let (part, area) =
            (shared.reserve(longest, "parts"), shared.reserve(AREA_WORDS, "what ranks meet in"));
        let (own, shared) = (own.allocate(&device)?, shared.allocate_shared(&device)?);
        let (part, mut area) = (shared.buffer::<f32>(part), shared.buffer::<u32>(area));
        let mut source = own.buffer::<f32>(source);
        let rank = comm.rank().index();
        let numbers: Vec<Vec<f32>> =
            (40..).take(comm.size()).map(|seed| numbers(seed, longest + TURNS)).collect();
        device.upload(&numbers[rank], source.all_mut())?;
        device.zero(area.all_mut())?;
        device.synchronize("zero what ranks meet in", LIMIT)?;

        let given = shared.export()?;
        let mut memories = Vec::with_capacity(comm.size());
        for (peer, descriptors) in (0..).map(Rank).zip(comm.exchange_descriptors(&[given.as_fd()])?) {
            memories.push(match &descriptors[..] {
                [] if peer == comm.rank() => None,
                [one] => Some(PeerMemory::map(&device, one.as_fd(), shared.bytes(), &peer.to_string())?),
                other => bail!("{peer} gave {} descriptors for its one piece of memory", other.len()),
            });
        }
        // All ranks' memory is laid out alike.
        let [place, area_place] = [part.address(), area.address()].map(|address| address - shared.address());
        let addresses = memories.iter().map(|memory| {
            let start = memory.as_ref().map_or(shared.address(), PeerMemory::address);
            PeerAddresses { buffer: start + place, area: start + area_place }
        });
        let addresses: Vec<PeerAddresses> = addresses.collect();
        let abort = Arc::new(HostWords::new(&device, 1)?);
        // The group may keep the notice for longer than the device lives.
        let word = Arc::downgrade(&abort);
        comm.on_abort(Box::new(move || {
            if let Some(word) = word.upgrade() {
                word.set(0, 1);
            }
        }));
        // SAFETY: the addresses are of this rank's buffers, and of the others' where they are mapped, which live in
        // `Adder` as long as anything is launched; every rank zeroed its area before it came to the exchange. All
        // ranks launch the same sums in the same order. A rank writes to its part behind a sum that has ended on it.
        let peers =
            unsafe { Peers::new(rank, &addresses, longest, abort.address(0), device.multiprocessors())? };
        let sum = own.buffer(sum);
        Ok(Adder { device, peers, numbers, lengths, part, area, source, sum, memories, place, abort, comm })
    }

    /// Sums of all lengths in each of [`WAYS`].
    pub(super) fn add(&mut self) -> Result<[Compared; WAYS.len()]> {
        let mut found = [Compared::default(); WAYS.len()];
        for &len in self.lengths {
            for (found, way) in found.iter_mut().zip(WAYS) {
                let graph = self.record(way, len)?;
                // Nobody's device waits for one whose driver is busy with a graph.
                self.comm.barrier()?;
                for turn in 0..TURNS {
                    let sum = self.turn(way, len, turn, &graph)?;
                    self.check()?;
                    let parts: Vec<Vec<f32>> =
                        self.numbers.iter().map(|of_rank| of_rank[turn..turn + len].to_vec()).collect();
                    *found = found.and(Compared::between(&bits(&all_reduce_reference(&parts)), &bits(&sum)));
                }
            }
        }
        Ok(found)
    }

    /// Leaves all of this rank's numbers in its part, and waits until the others have done so.
    pub(super) fn leave_numbers(&mut self) -> Result<()> {
        self.device.copy(self.source.slice(0..self.part.len()), self.part.all_mut())?;
        self.device.synchronize("leave its numbers", LIMIT)?;
        Ok(self.comm.barrier()?)
    }

    /// One more sum, to which rank `lost` does not come, and what there is of its numbers when that has ended.
    pub(super) fn outlive(&mut self, lost: usize) -> Result<Outlived> {
        let len = self.part.len();
        self.enqueue(self.device.clone().as_ref(), Way::OneShot, len)?;
        self.device.synchronize("end a sum to which a rank does not come", LIMIT)?;
        let Err(error) = self.check() else { bail!("a sum went well to which a rank did not come") };
        let memory =
            self.memories.get(lost).and_then(Option::as_ref).context("a rank that is not another")?;
        // SAFETY: a rank's part where it is mapped. That rank writes no more, and nobody else does.
        let part = unsafe { DeviceSlice::<f32>::new(memory.address() + self.place, len) };
        let mut left = vec![0.0; len];
        self.device.download(part, &mut left, LIMIT)?;
        let memory = Compared::between(&bits(&self.numbers[lost][..len]), &bits(&left));
        Ok(Outlived { error: format!("{error:#}"), memory })
    }

    fn turn(&mut self, way: Way, len: usize, turn: usize, graph: &Graph) -> Result<Vec<f32>> {
        let device = self.device.clone();
        device.copy(self.source.slice(turn..turn + len), self.part.slice_mut(0..len))?;
        match turn {
            0 => self.enqueue(device.as_ref(), way, len)?,
            _ => device.launch_graph(graph)?,
        }
        let mut sum = vec![0.0; len];
        device.download(self.sum.slice(0..len), &mut sum, LIMIT)?;
        Ok(sum)
    }

    fn record(&mut self, way: Way, len: usize) -> Result<Graph> {
        let device = self.device.clone();
        let graph = device.capture(|launcher| self.enqueue(launcher, way, len))?;
        device.synchronize("make a graph ready", LIMIT)?;
        Ok(graph)
    }

    fn enqueue(&mut self, launcher: &dyn Launcher, way: Way, len: usize) -> Result<(), KernelError> {
        all_reduce_by(launcher, &self.peers, way, self.sum.slice_mut(0..len))
    }

    /// Why what this rank's device computed does not count, if it does not.
    fn check(&mut self) -> Result<()> {
        let mut words = [0; STOP_WORDS];
        self.device.download(self.area.slice(AREA_WORDS - STOP_WORDS..AREA_WORDS), &mut words, LIMIT)?;
        let Some(stopped) = Stopped::of_words(words) else { return Ok(()) };
        if stopped.why == Why::PeerLate {
            let reason = format!("rank {} does not come to a sum", stopped.peer);
            self.comm.abort_handle().abort(&reason);
        }
        // The group is aborted, and says why.
        self.comm.barrier()?;
        bail!("a sum was stopped, and the group was not aborted: {stopped:?}")
    }
}

impl Drop for Adder {
    fn drop(&mut self) {
        // Whatever it waits for, it waits no more; its memory is given back when its device's work has ended.
        self.abort.set(0, 1);
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
