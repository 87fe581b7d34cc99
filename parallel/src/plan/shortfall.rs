//! What is short, where, and by how much.

use std::fmt;

use super::Plan;

/// Why a model cannot be served as asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortfall {
    /// Weights and activations alone are too large for a card.
    Model {
        /// The rank on it.
        rank: usize,
        /// The card.
        device: String,
        /// Bytes of weights.
        weight_bytes: u64,
        /// Bytes of activations.
        workspace_bytes: u64,
        /// Bytes that may be used.
        usable_bytes: u64,
        /// Bytes of its memory.
        memory_bytes: u64,
    },
    /// Beside them there is no room for one sequence of full length.
    Cache {
        /// The rank with the least room.
        rank: usize,
        /// Its card.
        device: String,
        /// Bytes that are left there.
        room_bytes: u64,
        /// Bytes that the sequence takes there.
        needed_bytes: u64,
        /// Tokens of the sequence.
        max_model_len: usize,
    },
    /// The memory for keys and values over all ranks holds no sequence of full length.
    Given {
        /// Bytes of it.
        kv_bytes: u64,
        /// Whether somebody said how much it is.
        is_asked_for: bool,
        /// Bytes that the sequence takes.
        needed_bytes: u64,
        /// Tokens of the sequence.
        max_model_len: usize,
    },
    /// The memory that was asked for is not there.
    Asked {
        /// The rank with the least room.
        rank: usize,
        /// Its card.
        device: String,
        /// Bytes that are left there.
        room_bytes: u64,
        /// Bytes that were asked for there.
        asked_bytes: u64,
    },
    /// The host has not as much memory as all ranks of all replicas together take.
    Host {
        /// Bytes of weights and activations.
        model_bytes: u64,
        /// Bytes of keys and values.
        kv_bytes: u64,
        /// Bytes for what loses its place among them.
        offloading_bytes: u64,
        /// Replicas that share it.
        replicas: usize,
        /// Bytes of its memory.
        memory_bytes: u64,
    },
}

impl Plan {
    /// The first thing that is short; `None` where the model can be served.
    pub fn shortfall(&self) -> Option<Shortfall> {
        self.model_too_large().or_else(|| self.cache_too_small()).or_else(|| self.host_too_small())
    }

    fn model_too_large(&self) -> Option<Shortfall> {
        let missing = |rank: &super::RankPlan| Some(rank.model_bytes().saturating_sub(rank.usable_bytes?));
        let worst = self.ranks.iter().enumerate().filter_map(|(at, rank)| Some((missing(rank)?, at)));
        // Of equals the first.
        let (missing, at) = worst.max_by_key(|(missing, at)| (*missing, std::cmp::Reverse(*at)))?;
        let rank = &self.ranks[at];
        (missing > 0).then(|| Shortfall::Model {
            rank: at,
            device: rank.device.name().to_owned(),
            weight_bytes: rank.weight_bytes(),
            workspace_bytes: rank.workspace_bytes,
            usable_bytes: rank.usable_bytes.unwrap_or(0),
            memory_bytes: rank.memory_bytes.unwrap_or(0),
        })
    }

    fn cache_too_small(&self) -> Option<Shortfall> {
        let (pages, needed) = (self.pages(), self.pages_needed());
        let max_model_len = self.request.limits.max_model_len;
        let on_host = self.ranks.iter().all(|rank| rank.usable_bytes.is_none());
        let page_bytes = self.page_bytes();
        let at = self.tightest();
        let (rank, device) = (&self.ranks[at], self.ranks[at].device.name().to_owned());
        let room_bytes = rank.room_bytes().unwrap_or(0);
        if pages < needed && (on_host || self.request.kv_bytes.is_some()) {
            return Some(Shortfall::Given {
                kv_bytes: self.request.kv_bytes.unwrap_or(super::HOST_KV_BYTES_DEFAULT),
                is_asked_for: self.request.kv_bytes.is_some(),
                needed_bytes: needed.saturating_mul(page_bytes),
                max_model_len,
            });
        }
        if pages < needed {
            let needed_bytes = needed.saturating_mul(rank.page_bytes);
            return Some(Shortfall::Cache { rank: at, device, room_bytes, needed_bytes, max_model_len });
        }
        let asked_bytes = pages.saturating_mul(rank.page_bytes);
        (!on_host && asked_bytes > room_bytes).then_some(Shortfall::Asked {
            rank: at,
            device,
            room_bytes,
            asked_bytes,
        })
    }

    fn host_too_small(&self) -> Option<Shortfall> {
        let (memory_bytes, replicas) = (self.request.host_memory_bytes?, self.request.replicas);
        let of_all = |bytes: u64| bytes.saturating_mul(replicas as u64);
        let (model_bytes, kv_bytes) = self.on_host();
        let (model_bytes, kv_bytes) = (of_all(model_bytes), of_all(kv_bytes));
        let offloading_bytes = of_all(self.request.offloading_bytes.unwrap_or(0));
        let all = model_bytes.saturating_add(kv_bytes).saturating_add(offloading_bytes);
        (all > memory_bytes).then_some(Shortfall::Host {
            model_bytes,
            kv_bytes,
            offloading_bytes,
            replicas,
            memory_bytes,
        })
    }

    /// Bytes of a replica in the host's memory: those of its model, and those of its keys and values.
    fn on_host(&self) -> (u64, u64) {
        let on_host = || self.ranks.iter().filter(|rank| rank.usable_bytes.is_none());
        let page_bytes: u64 = on_host().map(|rank| rank.page_bytes).sum();
        let model_bytes = on_host().map(super::RankPlan::model_bytes).sum();
        (model_bytes, page_bytes.saturating_mul(self.pool_pages() as u64))
    }

    /// The same together.
    pub(super) fn host_bytes(&self) -> u64 {
        let (model_bytes, kv_bytes) = self.on_host();
        model_bytes.saturating_add(kv_bytes)
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shortfall::Model { rank, device, weight_bytes, workspace_bytes, usable_bytes, memory_bytes } => {
                let missing = (weight_bytes + workspace_bytes).saturating_sub(*usable_bytes);
                write!(
                    f,
                    "rank {rank} on {device} lacks {}: its weights take {} and its workspace {}, and {} of its {} may \
                     be used",
                    amount(missing),
                    amount(*weight_bytes),
                    amount(*workspace_bytes),
                    amount(*usable_bytes),
                    amount(*memory_bytes)
                )
            }
            Shortfall::Cache { rank, device, room_bytes, needed_bytes, max_model_len } => write!(
                f,
                "rank {rank} on {device} lacks {}: beside weights and workspace {} are left for keys and values, and \
                 one sequence of max_model_len = {max_model_len} tokens needs {}",
                amount(needed_bytes.saturating_sub(*room_bytes)),
                amount(*room_bytes),
                amount(*needed_bytes)
            ),
            Shortfall::Given { kv_bytes, is_asked_for, needed_bytes, max_model_len } => write!(
                f,
                "the KV cache lacks {}: it has {} over all ranks{}, and one sequence of max_model_len = \
                 {max_model_len} tokens needs {}",
                amount(needed_bytes.saturating_sub(*kv_bytes)),
                amount(*kv_bytes),
                if *is_asked_for { "" } else { ", the default" },
                amount(*needed_bytes)
            ),
            Shortfall::Asked { rank, device, room_bytes, asked_bytes } => write!(
                f,
                "rank {rank} on {device} lacks {}: beside weights and workspace {} are left for keys and values, and \
                 kv_cache_memory_bytes asks for {} there",
                amount(asked_bytes.saturating_sub(*room_bytes)),
                amount(*room_bytes),
                amount(*asked_bytes)
            ),
            Shortfall::Host { model_bytes, kv_bytes, offloading_bytes, replicas, memory_bytes } => {
                let all = model_bytes.saturating_add(*kv_bytes).saturating_add(*offloading_bytes);
                write!(f, "the host lacks {}: ", amount(all.saturating_sub(*memory_bytes)))?;
                let over = if *replicas > 1 { format!(" over {replicas} replicas") } else { String::new() };
                if *model_bytes > 0 {
                    let (model, kv) = (amount(*model_bytes), amount(*kv_bytes));
                    write!(
                        f,
                        "all ranks' weights and workspace take {model}{over}, their keys and values {kv}, "
                    )?;
                }
                if *offloading_bytes > 0 {
                    write!(f, "kv_offloading_bytes asks for {}{over}, ", amount(*offloading_bytes))?;
                }
                write!(f, "and its memory has {}", amount(*memory_bytes))
            }
        }
    }
}

/// Bytes in decimal units, as data sheets give them.
pub fn amount(bytes: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    match UNITS.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", value / unit),
        None => format!("{bytes} B"),
    }
}
