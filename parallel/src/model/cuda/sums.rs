//! What a rank sums over ranks with, in one life of the group: kernels that read the others' memory, NCCL, or both.
//!
//! | file | what it is |
//! |---|---|
//! | `agree` | what all ranks have, found out together |
//! | `watch` | NCCL's communicator, and the thread that ends it |
//! | `measure` | which way is faster at which size |
//!
//! Which way a sum goes is the [table](WayTable)'s to say, the same on every rank. Where bits must depend on nothing
//! but their parts, and where nothing else is wanted, NCCL is not even opened.
#![allow(unsafe_code)]

mod agree;
mod measure;
mod watch;

use std::{sync::Arc, time::Duration};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{Means, Peers, Way, WayTable, all_gather_peers, all_reduce_by, all_reduce_rms_norm},
    cuda::{
        DeviceSlice, DeviceSliceMut, Launcher,
        device::{CudaDevice, DeviceBuffer},
        nccl::{Nccl, NcclError, UniqueId},
    },
    element::bf16,
    rms_norm::cuda::{Norm, rms_norm},
};

pub(super) use self::agree::{Agreement, Wishes, agree};
use self::watch::Watch;
use super::{super::ModelError, buffers::Buffers, group::refusal};
use crate::collective::Collective;

/// Longest wait for the device to leave first sums that failed.
const LEAVE_LIMIT: Duration = Duration::from_secs(20);

/// How one rank sums over ranks.
pub(super) struct Sums {
    /// Where the ranks' devices reach each other's memory.
    peers: Option<Peers>,
    watch: Option<Watch>,
    table: WayTable,
}

/// What a rank needs to meet the others through NCCL.
pub(super) struct Meeting<'a> {
    pub(super) device: &'a Arc<CudaDevice>,
    pub(super) buffers: &'a mut Buffers,
    pub(super) comm: &'a mut dyn Collective,
    /// Has this rank's own kernels leave their waits, where NCCL finds that sums failed.
    pub(super) leave: Box<dyn Fn() + Send>,
    /// Longest wait for the others, and for a device.
    pub(super) limit: Duration,
}

impl Sums {
    /// Has everything ready that sums need. Every rank gives what the ranks have agreed on; `peers` where that is our
    /// kernels.
    pub(super) fn join(
        agreement: Agreement,
        peers: Option<Peers>,
        meeting: Meeting<'_>,
    ) -> Result<Sums, ModelError> {
        let Meeting { device, buffers, comm, leave, limit } = meeting;
        let watch = match agreement.nccl {
            Some((library, id)) => meet(&library, &id, device, (comm, peers.is_none(), limit), leave)?,
            None => None,
        };
        let means = Means {
            ranks: comm.size(),
            kernels_max: peers.map_or(0, |peers| peers.capacity()),
            nccl: watch.is_some(),
            deterministic: agreement.deterministic,
        };
        let table = WayTable::by_rule(means).map_err(|no_way| refusal(no_way.to_string()))?;
        let mut sums = Sums { peers, watch, table };
        sums.practise(device, buffers, comm, limit)?;
        if comm.rank().0 == 0 {
            tracing::info!(ways = %sums.described(), "how ranks sum");
        }
        Ok(sums)
    }

    /// Sums what all ranks have in `part` into `out`.
    pub(super) fn add(
        &self,
        launcher: &dyn Launcher,
        part: DeviceSlice<'_, f32>,
        out: DeviceSliceMut<'_, f32>,
    ) -> Result<(), KernelError> {
        self.add_by(self.table.way(out.len()), launcher, part, out)
    }

    fn add_by(
        &self,
        way: Way,
        launcher: &dyn Launcher,
        part: DeviceSlice<'_, f32>,
        out: DeviceSliceMut<'_, f32>,
    ) -> Result<(), KernelError> {
        match (way, &self.peers, &self.watch) {
            // SAFETY: the memory lies in the model's arena, which outlives the communicator; all ranks do the same
            // steps, in which the table is the same; graphs go before the communicator does, and are replayed while it
            // lasts only.
            (Way::Nccl, _, Some(watch)) => unsafe { watch.communicator().all_reduce(launcher, part, out) },
            (way, Some(peers), _) => all_reduce_by(launcher, peers, way, out),
            (way, None, _) => Err(unmet(format!("a group that has no {way:?}"))),
        }
    }

    /// Adds the sum of what all ranks have in `part` to the residual and normalises it. Whether that is one launch or
    /// two does not show in the bits. `delta` is room for the sum.
    pub(super) fn add_and_normalise(
        &self,
        launcher: &dyn Launcher,
        part: DeviceSlice<'_, f32>,
        mut delta: DeviceSliceMut<'_, f32>,
        residual: DeviceSliceMut<'_, f32>,
        norm: Norm<'_>,
        out: DeviceSliceMut<'_, bf16>,
    ) -> Result<(), KernelError> {
        let elements = residual.len();
        match (self.table.way(elements), &self.peers) {
            (Way::OneShot, Some(peers)) => {
                all_reduce_rms_norm(launcher, peers, residual, norm.weight, norm.eps, out)
            }
            _ => {
                self.add(launcher, part, delta.range(0..elements))?;
                rms_norm(launcher, residual, Some(delta.shared()), norm, out)
            }
        }
    }

    /// Puts the ranks' rows side by side: `part` of rank `p` holds `rows` rows of `widths[p]`, `out` rows of their sum.
    pub(super) fn gather(
        &self,
        launcher: &dyn Launcher,
        part: &DeviceBuffer<f32>,
        rows: usize,
        widths: &[usize],
        mut out: DeviceSliceMut<'_, f32>,
    ) -> Result<(), KernelError> {
        let watch = match (&self.peers, &self.watch) {
            (Some(peers), _) => return all_gather_peers(launcher, peers, rows, widths, out),
            (None, Some(watch)) => watch,
            (None, None) => return Err(unmet("a group that can gather nothing".to_owned())),
        };
        watch.communicator().grouped(launcher, |group| {
            let mut to = 0;
            for row in 0..rows {
                for (root, &width) in widths.iter().enumerate() {
                    // Other ranks than the root give nothing: theirs may be anything as long.
                    let from = part.slice(row * width..(row + 1) * width);
                    // SAFETY: as for a sum.
                    unsafe { group.broadcast(root, from, out.range(to..to + width))? };
                    to += width;
                }
            }
            Ok(())
        })
    }

    /// Has `enqueue` replay a graph, unless what it recorded has ended.
    pub(super) fn replay(
        &self,
        enqueue: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        match &self.watch {
            Some(watch) => watch.communicator().while_it_lasts(enqueue),
            None => enqueue(),
        }
    }

    /// Before work is enqueued in which ranks wait for each other.
    pub(super) fn begins(&self) {
        self.watch.iter().for_each(Watch::begins);
    }

    /// When all of it has ended.
    pub(super) fn ended(&self) {
        self.watch.iter().for_each(Watch::ended);
    }

    /// Ends what the device may be waiting for in NCCL.
    pub(super) fn call_off(&self) {
        self.watch.iter().for_each(Watch::call_off);
    }

    /// Whether what the device summed so far counts; the device has nothing left to do.
    pub(super) fn check(&self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        let Some(watch) = &self.watch else { return Ok(()) };
        watch.communicator().check().map_err(|error| self.blame(error.into(), comm))
    }

    /// What NCCL told of a failure of this rank, if it did.
    pub(super) fn failure(&self) -> Option<ModelError> {
        Some(KernelError::from(self.watch.as_ref()?.failure()?).into())
    }

    /// Whose failure an error of a launch is: where the communicator has ended, the one for which it was ended.
    pub(super) fn blame(&self, error: KernelError, comm: &mut dyn Collective) -> ModelError {
        let KernelError::Nccl(nccl) = &error else { return error.into() };
        match &**nccl {
            NcclError::Ended { .. } => {}
            nccl if self.watch.as_ref().is_some_and(|watch| watch.is_called_off(nccl)) => {}
            // As the watch would have told it, had it looked sooner.
            nccl if nccl.is_of_a_peer() => comm.abort_handle().abort(&nccl.to_string()),
            _ => return error.into(),
        }
        if let Some(failure) = self.failure() {
            return failure;
        }
        // It is ended when the group is aborted, which says why.
        comm.barrier().map_or_else(ModelError::from, |()| error.into())
    }

    /// Connects the ranks and finds out which way is faster at which size.
    fn practise(
        &mut self,
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        comm: &mut dyn Collective,
        limit: Duration,
    ) -> Result<(), ModelError> {
        if self.watch.is_none() {
            return Ok(());
        }
        let Some(work) = comm.shared_work().begin() else {
            // The group is aborted, and says why.
            comm.barrier()?;
            return Err(refusal("a group that takes no work".to_owned()));
        };
        self.begins();
        let measured = self.measure(device, buffers, comm, limit);
        self.ended();
        match measured {
            Ok(table) => self.table = table,
            Err(error) => {
                let error = match error {
                    ModelError::Kernel(error) => self.blame(error, comm),
                    error => error,
                };
                comm.abort_handle().abort(&format!("{}: {error}", comm.rank()));
                if device.synchronize("leave its first sums", LEAVE_LIMIT).is_err() {
                    // It may go on in the others' memory.
                    work.strand();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn described(&self) -> String {
        let rows = self.table.rows().iter().map(|(max, way)| match max {
            &usize::MAX => format!("{way:?} for all others"),
            max => format!("{way:?} up to {} KiB", max * size_of::<f32>() / 1024),
        });
        rows.collect::<Vec<_>>().join(", ")
    }
}

/// Makes the communicator of this rank. `None` where some rank could not, and it is not
/// needed: then none has one.
fn meet(
    library: &Arc<Nccl>,
    id: &UniqueId,
    device: &Arc<CudaDevice>,
    (comm, is_needed, limit): (&mut dyn Collective, bool, Duration),
    leave: Box<dyn Fn() + Send>,
) -> Result<Option<Watch>, ModelError> {
    let begun = Watch::begin(library, id, device, (comm, limit), leave);
    let Some(watch) = together(begun, comm, is_needed)? else { return Ok(None) };
    let mut ready = watch.communicator().wait_until_ready(limit, &Vec::new);
    name_who_is_late(&mut ready, comm)?;
    together(ready.map(|()| watch), comm, is_needed)
}

/// All have begun, and NCCL tells none who hangs of those that are not ready; but who is ready knows that of itself.
fn name_who_is_late(ready: &mut Result<(), NcclError>, comm: &mut dyn Collective) -> Result<(), ModelError> {
    let is_late = matches!(ready, Err(NcclError::JoinTimeout { .. }));
    let told = comm.exchange(&[u8::from(is_late)])?;
    let late: Vec<usize> =
        told.iter().enumerate().filter(|(_, told)| told[..] == [1]).map(|(rank, _)| rank).collect();
    if let Err(NcclError::JoinTimeout { missing, begun, .. }) = ready
        && late.len() < told.len()
    {
        (*missing, *begun) = (late, true);
    }
    Ok(())
}

/// What came of a rank's part, once all ranks have done theirs. `None` where one could not, and it is not needed.
fn together<T>(
    outcome: Result<T, NcclError>,
    comm: &mut dyn Collective,
    is_needed: bool,
) -> Result<Option<T>, ModelError> {
    let rank = comm.rank();
    let told = match &outcome {
        Ok(_) => String::new(),
        Err(error @ NcclError::JoinTimeout { .. }) => {
            // Others may wait for ever.
            let advice =
                "without NCCL ranks sum with all_reduce = \"kernels\", where their devices reach each other";
            comm.abort_handle().abort(&format!("{error} ({advice})"));
            error.to_string()
        }
        Err(error) => error.to_string(),
    };
    let told = comm.exchange(told.as_bytes())?;
    let Some(at) = told.iter().position(|told| !told.is_empty()) else {
        return Ok(outcome.ok());
    };
    let reason = String::from_utf8_lossy(&told[at]).into_owned();
    if !is_needed {
        tracing::warn!(rank = rank.0, reason, "ranks sum without NCCL");
        return Ok(None);
    }
    match outcome {
        Err(error) => {
            comm.abort_handle().abort(&format!("{rank}: {error}"));
            Err(KernelError::from(error).into())
        }
        Ok(_) => {
            // It aborts the group.
            comm.barrier()?;
            Err(refusal(reason))
        }
    }
}

fn unmet(reason: String) -> KernelError {
    KernelError::Unsupported { operation: "sum over ranks", reason }
}
