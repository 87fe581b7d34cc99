//! The GPUs that a topology names, as they are on this machine.

use consort_kernels::cuda::{
    arch::Arch,
    device::{CudaError, DeviceFacts, Selector, devices, free_bytes},
    nccl,
    settings::Settings,
};
use consort_parallel::plan::{RankDevice, gpus};

use crate::topology::{AllReduce, DeviceSpec, Topology};

/// One card for each rank, replica by replica.
#[derive(Debug)]
pub(super) struct Cards {
    cards: Vec<Card>,
}

#[derive(Debug)]
struct Card {
    facts: DeviceFacts,
    /// What others have left of its memory.
    free_bytes: u64,
}

/// What the driver calls the device.
pub(super) fn selector(device: DeviceSpec) -> Result<Selector, CudaError> {
    device.to_string().parse().map_err(|error: consort_kernels::cuda::device::SelectorError| {
        CudaError::NoDevice { wanted: device.to_string(), reason: error.to_string() }
    })
}

impl Cards {
    /// Those that a topology wants, in rank order, replica by replica; `None` where ranks compute on CPUs. Only they
    /// are opened, and only when they are known to do.
    pub(super) fn look(topology: &Topology) -> Result<Option<Cards>, CudaError> {
        let wanted = topology.devices();
        if wanted.iter().all(DeviceSpec::is_cpu) {
            return Ok(None);
        }
        let settings = Settings::of_process();
        let known = devices(&settings)?;
        let find = |device: &DeviceSpec| {
            let selector = selector(*device)?;
            let found = known.iter().find(|card| selector.matches(card.ordinal, card.uuid));
            found.cloned().ok_or_else(|| {
                let listed: Vec<String> =
                    known.iter().map(|card| format!("cuda:{} ({})", card.ordinal, card.uuid)).collect();
                let reason = match listed.as_slice() {
                    [] => "the driver has no device".to_owned(),
                    listed => format!("the devices of this process are: {}", listed.join(", ")),
                };
                CudaError::NoDevice { wanted: device.to_string(), reason }
            })
        };
        let facts: Vec<DeviceFacts> = wanted.iter().map(find).collect::<Result<_, _>>()?;
        check(topology, &facts, &|| nccl::facts(&settings).map(drop))?;
        let with_free = |facts: DeviceFacts| {
            let free_bytes = free_bytes(&settings, facts.ordinal)?;
            Ok(Card { facts, free_bytes })
        };
        let cards = facts.into_iter().map(with_free).collect::<Result<_, CudaError>>()?;
        Ok(Some(Cards { cards }))
    }

    /// The same by identity, which is theirs in any process, as `wanted` names them by number.
    pub(super) fn by_uuid(&self, wanted: &[DeviceSpec]) -> Vec<DeviceSpec> {
        let named = |(card, wanted): (&Card, &DeviceSpec)| {
            DeviceSpec::parse(&format!("cuda:{}", card.facts.uuid)).unwrap_or(*wanted)
        };
        self.cards.iter().zip(wanted).map(named).collect()
    }

    /// The same for a planner, one for each rank: where several replicas have such a rank, the card that has least
    /// left.
    pub(super) fn devices(&self, ranks: usize) -> Vec<RankDevice> {
        let left = |card: &&Card| card.free_bytes.min(card.facts.memory_bytes);
        let of_rank = |rank: usize| self.cards.iter().skip(rank).step_by(ranks.max(1)).min_by_key(left);
        let device = |Card { facts, free_bytes }: &Card| RankDevice::Seen {
            card: gpus::of_driver(&facts.name, facts.memory_bytes, facts.multiprocessors),
            label: format!("cuda:{}", facts.ordinal),
            free_bytes: *free_bytes,
        };
        (0..ranks).filter_map(of_rank).map(device).collect()
    }
}

/// Whether these cards, one for each that is wanted, are different ones, of which the ranks of each replica can do the
/// work together. `nccl` tells what is wrong with NCCL, if anything is.
fn check(
    topology: &Topology,
    facts: &[DeviceFacts],
    nccl: &dyn Fn() -> Result<(), String>,
) -> Result<(), CudaError> {
    let (wanted, ranks) = (topology.devices(), topology.tensor_parallel_size());
    for (at, card) in facts.iter().enumerate() {
        if let Some(rank) = facts[..at].iter().position(|other| other.ordinal == card.ordinal) {
            let reason = format!(
                "\"{}\" (rank {rank}) and \"{}\" (rank {at}) are one card; each rank needs its own",
                wanted[rank], wanted[at]
            );
            return Err(CudaError::NoDevice { wanted: wanted[at].to_string(), reason });
        }
    }
    for (replica, card) in facts.chunks(ranks.max(1)).flat_map(|of| of.iter().map(move |card| (of, card))) {
        let (major, minor) = card.capability;
        Arch::of_device(major, minor).map_err(|error| CudaError::TooOld {
            ordinal: card.ordinal,
            name: card.name.clone(),
            reason: error.to_string(),
        })?;
        let unreached =
            replica.iter().find(|peer| peer.ordinal != card.ordinal && !card.peers.contains(&peer.ordinal));
        if let Some(peer) = unreached
            && let Err(how) = without_reach(topology, nccl)
        {
            return Err(CudaError::NoDevice {
                wanted: format!("cuda:{}", peer.ordinal),
                reason: format!("cuda:{} cannot use its memory, {how}", card.ordinal),
            });
        }
    }
    if topology.all_reduce() == AllReduce::Nccl && ranks > 1 {
        nccl().map_err(|lack| CudaError::NoDevice {
            wanted: wanted.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            reason: format!(
                "all_reduce = \"nccl\", and {lack}\nInstall NCCL ({INSTALL}), or leave all_reduce out"
            ),
        })?;
    }
    Ok(())
}

const INSTALL: &str = "`pip install nvidia-nccl-cu12`, or your distribution's libnccl2";

/// Whether cards that cannot use each other's memory sum through NCCL; if not, why that is, and what would do.
fn without_reach(topology: &Topology, nccl: &dyn Fn() -> Result<(), String>) -> Result<(), String> {
    const CARDS: &str = "choose cards that can (`consort doctor` shows which)";
    if topology.batch_invariant() {
        return Err(format!(
            "and with batch_invariant ranks sum over each other's memory, since NCCL has no fixed order of sums: \
             {CARDS}, or leave batch_invariant off"
        ));
    }
    if topology.all_reduce() == AllReduce::Kernels {
        return Err(format!("as all_reduce = \"kernels\" needs: {CARDS}, or leave all_reduce out"));
    }
    nccl().map_err(|lack| {
        format!("and without that ranks sum through NCCL: {lack}\nInstall NCCL ({INSTALL}), or {CARDS}")
    })
}
