//! A plan as numbers with names: what `--json` shows, and what is drawn.

use std::{collections::BTreeMap, error::Error};

use consort_parallel::plan::{
    KvFormat, Plan, PlanRequest, Policy, RankDevice, RankPlan, StepEstimate, WeightFormat,
    reserves::Reserves, shape::Attention,
};
use serde::Serialize;

use super::request::Asked;

/// Contexts that users are counted for.
const CONTEXTS: [usize; 4] = [2048, 8192, 32_768, 131_072];
/// Sequences of estimated steps.
const BATCHES: [usize; 4] = [1, 8, 32, 128];

/// All of it.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) fits: bool,
    pub(super) verdict: String,
    /// What is short where; null where nothing is.
    pub(super) shortfall: Option<String>,
    /// Each makes it fit by itself, the smallest first.
    pub(super) changes: Vec<String>,
    pub(super) model: Model,
    pub(super) settings: Settings,
    pub(super) weight_bytes: u64,
    pub(super) ranks: Vec<Rank>,
    pub(super) cache: Cache,
    /// Of each replica.
    pub(super) users: Vec<Users>,
    pub(super) users_of_all_replicas: Vec<Users>,
    /// Empty where a device's rates are unknown.
    pub(super) steps: Vec<Step>,
    pub(super) notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) parameters: u64,
    pub(super) active_parameters: u64,
    pub(super) layers: usize,
    pub(super) hidden_size: usize,
    pub(super) vocab_size: usize,
    pub(super) max_position_embeddings: usize,
    /// Null where a planner has no word for it.
    pub(super) stored_as: Option<&'static str>,
    pub(super) stored_bytes: Option<u64>,
    pub(super) experts: usize,
    pub(super) experts_per_token: usize,
    pub(super) kv_bytes_per_token: u64,
    pub(super) kv_bytes_per_kept_token: u64,
    pub(super) kv_bytes_of_windows: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Settings {
    pub(super) dtype: &'static str,
    pub(super) kv_cache_dtype: &'static str,
    pub(super) tensor_parallel_size: usize,
    pub(super) data_parallel_size: usize,
    pub(super) block_size: usize,
    pub(super) max_model_len: usize,
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
    pub(super) gpu_memory_utilization: Option<f64>,
    pub(super) kv_cache_memory_bytes: Option<u64>,
    pub(super) kv_offloading_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) device: String,
    pub(super) memory_bytes: Option<u64>,
    pub(super) query_heads: usize,
    /// KV heads; of latent attention none, for every rank holds the latent vector whole.
    pub(super) kv_heads: usize,
    pub(super) columns: usize,
    pub(super) expert_columns: usize,
    pub(super) vocabulary_rows: usize,
    pub(super) weight_bytes: u64,
    pub(super) weights: BTreeMap<&'static str, u64>,
    pub(super) workspace_bytes: u64,
    pub(super) reserves: NamedReserves,
    pub(super) usable_bytes: Option<u64>,
    pub(super) kv_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct NamedReserves {
    pub(super) driver_bytes: u64,
    pub(super) context_bytes: u64,
    pub(super) libraries_bytes: u64,
    pub(super) nccl_bytes: u64,
    pub(super) total_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Cache {
    pub(super) pages: u64,
    /// Those that the engine takes: no more than all sequences could use, unless somebody asked for them.
    pub(super) pool_pages: usize,
    pub(super) pages_needed: u64,
    /// Over all ranks.
    pub(super) page_bytes: u64,
    pub(super) layers_per_page: usize,
    /// Of each group of layers; null where all is seen.
    pub(super) windows: Vec<Option<usize>>,
}

/// Sequences of one length that there is room for; null beyond the longest.
#[derive(Debug, Serialize)]
pub(super) struct Users {
    pub(super) context: usize,
    pub(super) reserved: Option<u64>,
    pub(super) paged: Option<u64>,
    pub(super) windows_freed: Option<u64>,
    pub(super) windows_freed_fp8: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Step {
    pub(super) batch: usize,
    pub(super) context: usize,
    /// Whether there is room for so many sequences of that length.
    pub(super) has_room: bool,
    pub(super) slowest_rank: usize,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    pub(super) limit: &'static str,
    pub(super) weight_bytes: f64,
    pub(super) experts_read: f64,
    pub(super) kv_bytes: f64,
    pub(super) link_bytes: f64,
    pub(super) flops: f64,
    pub(super) memory_seconds: f64,
    pub(super) compute_seconds: Option<f64>,
    pub(super) link_seconds: f64,
    pub(super) all_reduces: usize,
}

impl Report {
    pub(super) fn new(plan: &Plan, asked: &Asked) -> Report {
        let step_context = asked.step_context;
        let shortfall = plan.shortfall();
        let pages = plan.pages();
        Report {
            fits: shortfall.is_none(),
            verdict: plan.verdict(),
            shortfall: shortfall.map(|shortfall| shortfall.to_string()),
            changes: plan.changes().iter().map(ToString::to_string).collect(),
            model: Model::new(plan, asked.stored_bytes),
            settings: Settings::new(plan),
            weight_bytes: plan.weight_bytes(),
            ranks: plan.ranks.iter().enumerate().map(|(at, rank)| Rank::new(at, rank, plan, pages)).collect(),
            cache: Cache {
                pages,
                pool_pages: plan.pool_pages(),
                pages_needed: plan.pages_needed(),
                page_bytes: plan.page_bytes(),
                layers_per_page: plan.cache.groups.layers_per_page(),
                windows: plan.cache.groups.windows().collect(),
            },
            users: CONTEXTS.iter().map(|&context| Users::new(context, plan, 1)).collect(),
            users_of_all_replicas: CONTEXTS
                .iter()
                .map(|&context| Users::new(context, plan, plan.request.replicas))
                .collect(),
            steps: BATCHES
                .iter()
                .filter_map(|&batch| Some(Step::new(plan.step(batch, step_context)?, plan)))
                .collect(),
            notes: notes(plan, asked.not_run.as_deref()),
        }
    }
}

impl Model {
    fn new(plan: &Plan, stored_bytes: Option<u64>) -> Model {
        let model = &plan.request.model;
        let experts = model.experts.unwrap_or_default();
        let format = plan.request.kv_format;
        Model {
            name: model.name.clone(),
            parameters: model.parameters(),
            active_parameters: model.active_parameters(),
            layers: model.layers(),
            hidden_size: model.hidden,
            vocab_size: model.vocabulary,
            max_position_embeddings: model.context_max,
            stored_as: model.stored.map(WeightFormat::name),
            stored_bytes,
            experts: experts.count,
            experts_per_token: experts.chosen,
            kv_bytes_per_token: model.kv_bytes_per_token(format),
            kv_bytes_per_kept_token: model.kv_bytes_per_kept_token(format),
            kv_bytes_of_windows: model.kv_bytes_of_windows(&plan.cache, format),
        }
    }
}

impl Settings {
    fn new(plan: &Plan) -> Settings {
        let (request, limits) = (&plan.request, &plan.request.limits);
        Settings {
            dtype: request.format.name(),
            kv_cache_dtype: request.kv_format.name(),
            tensor_parallel_size: request.devices.len(),
            data_parallel_size: request.replicas,
            block_size: limits.block_size,
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            gpu_memory_utilization: request.utilization,
            kv_cache_memory_bytes: request.kv_bytes,
            kv_offloading_bytes: request.offloading_bytes,
        }
    }
}

impl Rank {
    fn new(at: usize, rank: &RankPlan, plan: &Plan, pages: u64) -> Rank {
        let share = &rank.share;
        let Reserves { driver_bytes, context_bytes, libraries_bytes, nccl_bytes } = rank.reserves;
        let is_latent = matches!(plan.request.model.attention, Attention::Latent(_));
        Rank {
            rank: at,
            device: match &rank.device {
                RankDevice::Seen { card, label, .. } => format!("{label} ({})", card.name),
                device => device.name().to_owned(),
            },
            memory_bytes: rank.memory_bytes,
            query_heads: share.query_heads.len(),
            kv_heads: if is_latent { 0 } else { share.kv_heads.len() },
            columns: share.columns.len(),
            expert_columns: share.expert_columns.len(),
            vocabulary_rows: share.vocabulary.len(),
            weight_bytes: rank.weight_bytes(),
            weights: rank.weights.iter().map(|(group, bytes)| (group.name(), *bytes)).collect(),
            workspace_bytes: rank.workspace_bytes,
            reserves: NamedReserves {
                driver_bytes,
                context_bytes,
                libraries_bytes,
                nccl_bytes,
                total_bytes: rank.reserves.total_bytes(),
            },
            usable_bytes: rank.usable_bytes,
            kv_bytes: pages.saturating_mul(rank.page_bytes),
        }
    }
}

impl Users {
    fn new(context: usize, plan: &Plan, replicas: usize) -> Users {
        let users = |policy, format| {
            plan.users(context, policy, format).map(|users| users.saturating_mul(replicas as u64))
        };
        let format = plan.request.kv_format;
        Users {
            context,
            reserved: users(Policy::Reserved, format),
            paged: users(Policy::Paged, format),
            windows_freed: users(Policy::WindowsFreed, format),
            windows_freed_fp8: users(Policy::WindowsFreed, KvFormat::Fp8),
        }
    }
}

impl Step {
    fn new(step: StepEstimate, plan: &Plan) -> Step {
        let users = plan.users(step.context, Policy::WindowsFreed, plan.request.kv_format);
        Step {
            has_room: users.is_some_and(|users| step.batch as u64 <= users),
            batch: step.batch,
            context: step.context,
            slowest_rank: step.rank,
            seconds: step.seconds,
            tokens_per_second: step.tokens_per_second(),
            limit: step.limit.name(),
            weight_bytes: step.weight_bytes,
            experts_read: step.experts_read,
            kv_bytes: step.kv_bytes,
            link_bytes: step.link_bytes,
            flops: step.flops,
            memory_seconds: step.memory_seconds,
            compute_seconds: step.compute_seconds,
            link_seconds: step.link_seconds,
            all_reduces: step.sums,
        }
    }
}

/// What this version does not do, and what is not known.
fn notes(plan: &Plan, not_run: Option<&str>) -> Vec<String> {
    let request = &plan.request;
    let mut notes = Vec::new();
    notes.extend(not_run.map(str::to_owned));
    notes.extend(not_served(request));
    let cards: Vec<_> = plan.ranks.iter().filter_map(|rank| rank.device.gpu()).collect();
    if cards.len() < plan.ranks.len() {
        notes.push(
            "how fast a processor reads and multiplies is not known, so no step is estimated".to_owned(),
        );
    } else if cards.iter().any(|card| card.memory_bandwidth.is_none()) {
        notes.push("a card's bandwidth is not known, so no step is estimated".to_owned());
    } else if cards.iter().any(|card| card.flops.is_none()) {
        notes.push(
            "how fast a card multiplies is not known, so steps are held against its memory alone".to_owned(),
        );
    }
    notes
}

/// Formats that are only planned: those that `consort serve` holds nothing in on such devices.
pub(super) fn not_served(request: &PlanRequest) -> Vec<String> {
    let PlanRequest { format, kv_format, devices, .. } = request;
    let mut planned_only = Vec::new();
    match format {
        WeightFormat::BFloat16 => {}
        WeightFormat::Float32 if devices.iter().all(|device| device.gpu().is_none()) => {}
        WeightFormat::Float32 => planned_only
            .push("this version computes in bfloat16 on GPUs: float32 is planned only there".to_owned()),
        WeightFormat::Fp8 | WeightFormat::Mxfp4 => planned_only
            .push(format!("this version holds weights in bfloat16 or float32: {format} is planned only")),
    }
    if *kv_format == KvFormat::Fp8 {
        planned_only
            .push("this version holds keys and values in 16 or 32 bits: fp8 is planned only".to_owned());
    } else if *kv_format != format.kv() {
        planned_only.push(format!(
            "this version holds keys and values in {} beside weights in {format}: {} is planned only",
            format.kv().name(),
            kv_format.name()
        ));
    }
    planned_only
}

/// An error and its causes in a line.
pub(super) fn with_cause(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
