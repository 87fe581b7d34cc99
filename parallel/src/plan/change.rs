//! The smallest change that makes a model fit: each candidate is planned anew, and only what fits is proposed.

use std::fmt;

use super::{KvFormat, Plan, PlanRequest, RankDevice, WeightFormat, gpus, shortfall::amount};

/// Fewest tokens of a step that are proposed: fewer would make prompts slow.
const BATCHED_TOKENS_MIN: usize = 256;
/// A context is shortened before cards are added if so much of it is left.
const CONTEXT_PART_KEPT: usize = 4;
/// Most ranks that are proposed.
const RANKS_MAX: usize = 256;
/// Steps of a utilization that is proposed.
const UTILIZATION_STEPS: f64 = 1000.0;

/// Something to ask for in place of what was.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// More of each card.
    Utilization(f64),
    /// Another amount of memory for keys and values, over all ranks of a replica.
    KvBytes(u64),
    /// Less of the host's memory for what loses its place in the cache; none for 0.
    OffloadingBytes(u64),
    /// Smaller steps, and so smaller activations.
    BatchedTokens(usize),
    /// Shorter sequences.
    Context(usize),
    /// Weights in another format.
    Format {
        /// Which.
        format: WeightFormat,
        /// Whether the checkpoint holds them so, and nothing is lost.
        is_stored: bool,
    },
    /// Keys and values in eight bits.
    KvFormat(KvFormat),
    /// More cards of the last kind.
    Ranks {
        /// How many in all, for each replica.
        ranks: usize,
        /// Which.
        device: String,
        /// Replicas, which are as many as before.
        replicas: usize,
    },
    /// As many other cards.
    Cards {
        /// How many, for each replica.
        ranks: usize,
        /// Which.
        device: String,
        /// Replicas, which are as many as before.
        replicas: usize,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Utilization(part) => write!(f, "gpu_memory_utilization = {part}"),
            Change::KvBytes(bytes) => write!(f, "kv_cache_memory_bytes = {bytes} ({})", amount(*bytes)),
            Change::OffloadingBytes(0) => f.write_str("no kv_offloading_bytes"),
            Change::OffloadingBytes(bytes) => {
                write!(f, "kv_offloading_bytes = {bytes} ({})", amount(*bytes))
            }
            Change::BatchedTokens(tokens) => write!(f, "max_num_batched_tokens = {tokens}"),
            Change::Context(tokens) => write!(f, "max_model_len = {tokens}"),
            Change::Format { format, is_stored: true } => {
                write!(f, "dtype = {format}, as the checkpoint holds it")
            }
            Change::Format { format, is_stored: false } => write!(f, "dtype = {format}"),
            Change::KvFormat(format) => write!(f, "keys and values in {}", format.name()),
            Change::Ranks { ranks, device, replicas } => {
                write!(f, "{ranks} x {device}{}", of_replicas(*replicas))
            }
            Change::Cards { ranks, device, replicas } => {
                write!(f, "{ranks} x {device} instead{}", of_replicas(*replicas))
            }
        }
    }
}

impl Plan {
    /// Changes that make the model fit, each by itself, the smallest first; none where it fits already. What loses
    /// nothing comes before what costs speed or length, that before more cards, and last come formats that lose
    /// precision.
    pub fn changes(&self) -> Vec<Change> {
        if self.fits() {
            return Vec::new();
        }
        let (short, shorter) = match self.longest_context() {
            Some(tokens) if tokens * CONTEXT_PART_KEPT >= self.request.limits.max_model_len => {
                (Some(tokens), None)
            }
            other => (None, other),
        };
        let formats = |lossless| self.formats(lossless);
        let mut changes: Vec<Change> = Vec::new();
        changes.extend(self.utilization());
        changes.extend(self.kv_bytes());
        changes.extend(self.offloading_bytes());
        changes.extend(self.batched_tokens());
        changes.extend(formats(true));
        changes.extend(short.map(Change::Context));
        changes.extend(self.more_ranks());
        changes.extend(self.other_cards());
        changes.extend(formats(false));
        changes.extend(self.kv_format());
        changes.extend(shorter.map(Change::Context));
        changes
    }

    fn with(&self, change: impl FnOnce(&mut PlanRequest)) -> Option<Plan> {
        let mut request = self.request.clone();
        change(&mut request);
        Plan::new(&request).ok().filter(Plan::fits)
    }

    fn utilization(&self) -> Option<Change> {
        self.request.utilization?;
        let needed = |rank: &super::RankPlan| {
            let all = rank.model_bytes().saturating_add(self.pages_needed().saturating_mul(rank.page_bytes));
            Some(all as f64 / rank.memory_bytes? as f64)
        };
        let part = self.ranks.iter().filter_map(needed).fold(0.0, f64::max);
        let part = (part * UTILIZATION_STEPS).ceil() / UTILIZATION_STEPS;
        let is_more = self.request.utilization.is_some_and(|given| part > given && part <= 1.0);
        self.with(|request| request.utilization = Some(part))
            .filter(|_| is_more)
            .map(|_| Change::Utilization(part))
    }

    /// Enough for one sequence of full length where less was given; what there is room for where more was.
    fn kv_bytes(&self) -> Option<Change> {
        let page_bytes = self.page_bytes();
        let enough = self.pages_needed().saturating_mul(page_bytes);
        let room =
            self.with(|request| request.kv_bytes = None).map(|plan| plan.pages().saturating_mul(page_bytes));
        let on_cards = self.ranks.iter().any(|rank| rank.usable_bytes.is_some());
        let bytes = match (self.request.kv_bytes, on_cards) {
            (Some(given), true) => room.map(|room| given.clamp(enough.min(room), room))?,
            (None, true) => return None,
            (_, false) => enough,
        };
        self.with(|request| request.kv_bytes = Some(bytes)).map(|_| Change::KvBytes(bytes))
    }

    /// What the host has left beside all else, or nothing at all.
    fn offloading_bytes(&self) -> Option<Change> {
        let given = self.request.offloading_bytes?;
        let replicas = self.request.replicas.max(1) as u64;
        let room = (self.request.host_memory_bytes? / replicas).saturating_sub(self.host_bytes());
        let page_bytes = self.page_bytes().max(1);
        // In whole pages: less than one would be refused.
        let bytes = room / page_bytes * page_bytes;
        let asked = (bytes > 0).then_some(bytes);
        self.with(|request| request.offloading_bytes = asked)
            .filter(|_| bytes < given)
            .map(|_| Change::OffloadingBytes(bytes))
    }

    fn batched_tokens(&self) -> Option<Change> {
        let asked = self.request.limits.max_num_batched_tokens;
        // Every sequence that runs has a token in a step.
        let least = BATCHED_TOKENS_MIN.max(self.request.limits.max_num_seqs);
        let halves = std::iter::successors(Some(asked / 2), |tokens| Some(tokens / 2));
        let mut halves = halves.take_while(|tokens| *tokens >= least);
        let tokens = halves
            .find(|tokens| self.with(|request| request.limits.max_num_batched_tokens = *tokens).is_some())?;
        Some(Change::BatchedTokens(tokens))
    }

    fn formats(&self, lossless: bool) -> Option<Change> {
        let PlanRequest { model, format, formats, .. } = &self.request;
        // Nothing is lost in the checkpoint's own format, and where each number has more bits than it has there.
        let keeps_all = |other: WeightFormat| {
            let holds_all_of = |stored| other == stored || other >= WeightFormat::BFloat16 && other > stored;
            // A type that has no name here may have more digits than bfloat16.
            model.stored.map_or(other == WeightFormat::Float32, holds_all_of)
        };
        let mut smaller: Vec<WeightFormat> = formats
            .iter()
            .copied()
            .filter(|other| other < format && other.suits(model) && keeps_all(*other) == lossless)
            .collect();
        smaller.sort();
        let next = smaller.into_iter().rev().find(|other| {
            self.with(|request| {
                request.format = *other;
                request.kv_format =
                    if request.kv_format == format.kv() { other.kv() } else { request.kv_format };
            })
            .is_some()
        })?;
        Some(Change::Format { format: next, is_stored: Some(next) == model.stored })
    }

    fn kv_format(&self) -> Option<Change> {
        let smaller = KvFormat::Fp8;
        // Where only BF16 can be had, so it is for keys and values.
        let may_be_proposed = self.request.formats.contains(&WeightFormat::Fp8);
        if self.request.kv_format == smaller || !may_be_proposed {
            return None;
        }
        self.with(|request| request.kv_format = smaller).map(|_| Change::KvFormat(smaller))
    }

    /// The longest context that fits, in whole pages.
    fn longest_context(&self) -> Option<usize> {
        let block = self.request.limits.block_size;
        let fits = |pages: usize| self.with(|r| r.limits.max_model_len = pages * block).is_some();
        let (mut fitting, mut failing) = (0, self.request.limits.max_model_len.div_ceil(block));
        while fitting + 1 < failing {
            let middle = fitting + (failing - fitting) / 2;
            if fits(middle) {
                fitting = middle;
            } else {
                failing = middle;
            }
        }
        (fitting > 0).then_some(fitting * block)
    }

    fn more_ranks(&self) -> Option<Change> {
        let last = self.request.devices.last().filter(|device| device.gpu().is_some())?;
        let name = last.gpu().map(|card| card.name.to_string())?;
        let ranks = (self.request.devices.len() + 1..=RANKS_MAX).find(|&ranks| {
            self.with(|request| {
                request.devices.resize(ranks, last.clone());
                request.shares = None;
            })
            .is_some()
        })?;
        Some(Change::Ranks { ranks, device: name, replicas: self.request.replicas })
    }

    fn other_cards(&self) -> Option<Change> {
        let ranks = self.request.devices.len();
        // Of a machine's own cards there are no others.
        if !self.request.devices.iter().all(|device| matches!(device, RankDevice::Card(_))) {
            return None;
        }
        let largest =
            self.request.devices.iter().filter_map(|device| Some(device.gpu()?.memory_bytes)).max()?;
        let larger = gpus::all().into_iter().filter(|card| card.memory_bytes > largest);
        let card = larger.into_iter().find(|card| {
            self.with(|request| request.devices = vec![RankDevice::Card(card.clone()); ranks]).is_some()
        })?;
        Some(Change::Cards { ranks, device: card.name.to_string(), replicas: self.request.replicas })
    }

    /// Whether the model fits, in a sentence: what is short where, and the smallest change.
    pub fn verdict(&self) -> String {
        let PlanRequest { model, format, devices, replicas, .. } = &self.request;
        let name = model.called();
        let on = listed(devices) + &of_replicas(*replicas);
        let Some(shortfall) = self.shortfall() else {
            return format!("{name} in {format} fits on {on}");
        };
        let changes = self.changes();
        let remedy = match changes.as_slice() {
            [] => "no single change makes it fit".to_owned(),
            [smallest, others @ ..] => {
                let others: String = others.iter().map(|change| format!("; or {change}")).collect();
                format!("the smallest change: {smallest}{others}")
            }
        };
        format!("{name} in {format} does not fit on {on}: {shortfall}; {remedy}")
    }
}

/// What follows a list of devices that each replica has.
fn of_replicas(replicas: usize) -> String {
    if replicas > 1 { format!(" for each of {replicas} replicas") } else { String::new() }
}

/// `3 x H100-80GB, 1 x L40S`.
pub(super) fn listed(devices: &[RankDevice]) -> String {
    let mut counts: Vec<(usize, &str)> = Vec::new();
    for device in devices {
        let name = device.gpu().map_or("cpu", |card| &card.name);
        match counts.last_mut() {
            Some((count, last)) if *last == name => *count += 1,
            _ => counts.push((1, name)),
        }
    }
    counts.iter().map(|(count, name)| format!("{count} x {name}")).collect::<Vec<_>>().join(", ")
}
