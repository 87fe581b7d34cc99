//! How long sums take in each way, on the devices at hand.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{Timing, Way, WayTable},
    cuda::device::{CudaDevice, Graph},
};

use super::{
    super::{super::ModelError, buffers::Buffers, group::refusal},
    Sums,
};
use crate::collective::Collective;

/// The smallest sum that is tried, in elements: 4 KiB. Others are four times as long as the one before.
const ELEMENTS_MIN: usize = 1024;
/// Sums of which the mean counts: as many as a graph of a few layers has.
const SUMS: usize = 8;
/// After so long no further size is tried; those go as the largest that was.
const BUDGET: Duration = Duration::from_secs(1);

/// Every way there is, as a timing has them.
const WAYS: [Way; 3] = [Way::OneShot, Way::TwoShots, Way::Nccl];

impl Sums {
    /// Sums once of every size, so that NCCL connects the ranks, and where there is a choice measures which way is the
    /// fastest. Every rank comes to the same table.
    pub(super) fn measure(
        &self,
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        comm: &mut dyn Collective,
        limit: Duration,
    ) -> Result<WayTable, ModelError> {
        let means = *self.table.means();
        let started = Instant::now();
        device.zero(buffers.exchange.all_mut())?;
        let mut timings = vec![Vec::new(); comm.size()];
        for elements in sizes(buffers.delta.len().min(buffers.exchange.len())) {
            self.begins();
            let ways: Vec<Way> = WAYS.into_iter().filter(|way| self.has(*way, elements)).collect();
            for &way in &ways {
                let (part, out) = (buffers.exchange.slice(0..elements), buffers.delta.slice_mut(0..elements));
                self.add_by(way, &**device, part, out)?;
            }
            device.synchronize("sum over ranks for the first time", limit).map_err(KernelError::from)?;
            self.check(comm)?;
            if ways.len() < 2 {
                continue;
            }
            let timing = self.time(&ways, elements, device, buffers, comm, limit)?;
            let told = comm.exchange(&encode(&timing, started.elapsed()))?;
            let told = told.iter().map(|bytes| decode(bytes)).collect::<Option<Vec<_>>>();
            let told = told.ok_or_else(|| refusal("a rank timed something else".to_owned()))?;
            timings.iter_mut().zip(&told).for_each(|(of_rank, (timing, _))| of_rank.push(*timing));
            // By one clock, so that all ranks stop together.
            if told.first().is_some_and(|(_, elapsed)| *elapsed > BUDGET) {
                break;
            }
        }
        if self.peers.is_none() {
            // The first of its kind connects ranks, too.
            let widths = vec![1; comm.size()];
            let all = buffers.logits.slice_mut(0..widths.len());
            self.gather(&**device, &buffers.exchange, 1, &widths, all)?;
            device.synchronize("gather over ranks for the first time", limit).map_err(KernelError::from)?;
            self.check(comm)?;
        }
        WayTable::measured(means, &Timing::slowest(&timings)).map_err(|no_way| refusal(no_way.to_string()))
    }

    fn has(&self, way: Way, elements: usize) -> bool {
        match way {
            Way::OneShot | Way::TwoShots => self.peers.is_some_and(|peers| elements <= peers.capacity()),
            Way::Nccl => self.watch.is_some(),
        }
    }

    /// From graphs, as most sums are launched, so that what the host takes does not count.
    fn time(
        &self,
        ways: &[Way],
        elements: usize,
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        comm: &mut dyn Collective,
        limit: Duration,
    ) -> Result<Timing, ModelError> {
        let record = |&way: &Way| -> Result<(Way, Graph), KernelError> {
            let graph = device.capture(|recorder| {
                (0..SUMS).try_for_each(|_| {
                    let part = buffers.exchange.slice(0..elements);
                    self.add_by(way, recorder, part, buffers.delta.slice_mut(0..elements))
                })
            })?;
            Ok((way, graph))
        };
        let graphs = ways.iter().map(record).collect::<Result<Vec<_>, _>>()?;
        // Making a graph, or destroying one, may wait for the others' devices.
        comm.barrier()?;
        let mut timing = Timing { elements, one_shot_us: None, two_shots_us: None, nccl_us: None };
        for (way, graph) in &graphs {
            let launch = || self.replay(|| Ok(device.launch_graph(graph)?));
            launch()?;
            let took = device.measure(limit, launch)?;
            let us = Some((took.as_secs_f64() * 1e6 / SUMS as f64) as f32);
            match way {
                Way::OneShot => timing.one_shot_us = us,
                Way::TwoShots => timing.two_shots_us = us,
                Way::Nccl => timing.nccl_us = us,
            }
        }
        self.check(comm)?;
        comm.barrier()?;
        drop(graphs);
        comm.barrier()?;
        Ok(timing)
    }
}

/// Elements of the sums that are tried, up to those of the buffers.
fn sizes(longest: usize) -> impl Iterator<Item = usize> {
    let by_fours = std::iter::successors(Some(ELEMENTS_MIN), |elements| elements.checked_mul(4));
    by_fours.take_while(move |elements| *elements < longest).chain((longest > 0).then_some(longest))
}

const TIMING_BYTES: usize = 28;

/// A timing and the time since the first; ways that were not tried are no numbers.
fn encode(timing: &Timing, elapsed: Duration) -> Vec<u8> {
    let Timing { elements, one_shot_us, two_shots_us, nccl_us } = *timing;
    let long = [elements as u64, elapsed.as_micros() as u64].into_iter().flat_map(u64::to_le_bytes);
    let short = [one_shot_us, two_shots_us, nccl_us].map(|us| us.unwrap_or(f32::NAN));
    long.chain(short.into_iter().flat_map(f32::to_le_bytes)).collect()
}

fn decode(bytes: &[u8]) -> Option<(Timing, Duration)> {
    let bytes: &[u8; TIMING_BYTES] = bytes.try_into().ok()?;
    let long = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let us = |at: usize| {
        let us = bytes[at..].first_chunk().map(|bytes| f32::from_le_bytes(*bytes));
        us.filter(|us| us.is_finite())
    };
    let timing = Timing {
        elements: usize::try_from(long(0)?).ok()?,
        one_shot_us: us(16),
        two_shots_us: us(20),
        nccl_us: us(24),
    };
    Some((timing, Duration::from_micros(long(8)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_few_and_the_last_is_the_longest() {
        assert_eq!(sizes(20_000).collect::<Vec<_>>(), [1024, 4096, 16_384, 20_000]);
        assert_eq!(sizes(1024).collect::<Vec<_>>(), [1024]);
        assert_eq!(sizes(7).collect::<Vec<_>>(), [7]);
        assert_eq!(sizes(0).count(), 0);
        assert!(sizes(usize::MAX).count() < 32);
    }

    #[test]
    fn ranks_understand_each_others_timings_and_nothing_else() {
        let timing =
            Timing { elements: 1 << 40, one_shot_us: Some(1.5), two_shots_us: None, nccl_us: Some(0.0) };
        let bytes = encode(&timing, Duration::from_micros(17));
        assert_eq!(decode(&bytes), Some((timing, Duration::from_micros(17))));
        assert_eq!(decode(&bytes[1..]), None);
        assert_eq!(decode(&[&bytes[..], &[0]].concat()), None);
    }
}
