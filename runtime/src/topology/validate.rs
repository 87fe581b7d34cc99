//! The rules: a raw topology to a validated one, or every rule that it breaks.

mod devices;
mod fields;
mod listen;
pub(super) mod model;
pub(super) mod words;

use std::{collections::BTreeSet, path::Path};

use self::{devices::Placement, fields::Fields};
use super::{
    ApiKey, ListenAddress, Topology,
    env::Environment,
    error::{TopologyError, Violations},
    origins::Origins,
    raw::{Leaf, RawCache, RawScheduler, RawServer, RawTopology, Sourced},
    secrets::{is_plain_name, is_variable_name},
};

/// More ranks than any machine has devices; keeps a typing error from allocating.
const RANKS_MAX: i64 = 1024;
const THREADS_MAX: i64 = 1024;
/// Positions that a sequence could ever have, far above any model.
const MODEL_LEN_MAX: i64 = 1 << 27;
const SEQUENCES_MAX: i64 = 1 << 16;
const BATCHED_TOKENS_MAX: i64 = 1 << 20;
const WAITING_MAX: i64 = 1 << 20;
/// A day. Times this, any priority is far from the end of 64 bits.
const PRIORITY_AGING_MS_MAX: i64 = 24 * 3600 * 1000;
/// Blocks are 16 tokens in a kernel's eyes; beyond this, a cache of short sequences is mostly padding.
const BLOCK_SIZE_MAX: i64 = 256;
/// What TOML can write.
const KV_BYTES_MAX: u64 = i64::MAX as u64;
const BODY_BYTES_MAX: u64 = 1 << 30;

const MAX_NUM_SEQS: i64 = 256;
/// On a CPU, larger activations leave the second-level cache.
const MAX_NUM_BATCHED_TOKENS: i64 = 512;
const MAX_WAITING_REQUESTS: i64 = 1024;
const BLOCK_SIZE: i64 = 16;
/// A request of the next worse priority waits that much longer than others at most: a pause that people notice, and
/// that batch work does not.
const PRIORITY_AGING_MS: u64 = 10_000;
/// Part of a card's memory that is used where nothing else is said.
pub(crate) const GPU_MEMORY_UTILIZATION: f64 = 0.9;
/// Prompts of a million tokens fit as JSON.
const MAX_BODY_BYTES: u64 = 16 << 20;

/// Rules are broken.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) error: TopologyError,
    /// What is left, if a model is.
    pub(crate) rest: Option<Box<Rest>>,
}

/// A topology in which defaults stand for values that broke rules. Good for nothing but to find what else is wrong.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) topology: Topology,
    /// Keys whose values are not those that were asked for.
    pub(crate) doubtful: BTreeSet<String>,
}

impl From<TopologyError> for Broken {
    fn from(error: TopologyError) -> Broken {
        Broken { error, rest: None }
    }
}

impl From<Broken> for TopologyError {
    fn from(broken: Broken) -> TopologyError {
        broken.error
    }
}

pub(super) fn validate(
    mut raw: RawTopology,
    folder: &Path,
    environment: &Environment,
    violations: Violations,
) -> Result<Topology, Broken> {
    devices::settle(&mut raw);
    let origins = Origins::of(&mut raw, &violations);
    let mut fields = Fields { violations };
    let model_path = model::path(raw.model.path.as_ref(), folder, &mut fields.violations);
    let dtype = words::dtype(&raw.model.dtype, &mut fields.violations);
    let max_model_len = fields.optional_count("model.max_model_len", &raw.model.max_model_len, MODEL_LEN_MAX);
    let served_model_name =
        model::served_name(raw.model.served_model_name.take(), &model_path, &mut fields.violations);
    let Placement { devices, replicas } = devices::placement(&raw.parallel, &raw.node, &mut fields);
    let weights = devices::weights(&raw, devices.len() / replicas, &mut fields.violations);
    let isolation = words::isolation(
        &raw.parallel.isolation,
        raw.parallel.isolates_gpus,
        &devices,
        &mut fields.violations,
    );
    let all_reduce = words::all_reduce(&raw.parallel, &devices, &mut fields.violations);
    let cpu_isa = words::cpu_isa(&raw.parallel.cpu_isa, &mut fields.violations);
    let threads_per_rank =
        fields.optional_count("parallel.threads_per_rank", &raw.parallel.threads_per_rank, THREADS_MAX);
    let (block_size, kv_cache_memory_bytes, kv_offloading_bytes, gpu_memory_utilization) =
        cache(&raw.cache, &mut fields);
    let (max_num_seqs, max_num_batched_tokens, max_waiting_requests) = scheduler(&raw.scheduler, &mut fields);
    let priority_aging_ms = priority_aging_ms(&raw.scheduler, &mut fields.violations);
    let (listen, api_key_env, api_keys, max_body_bytes) = server(&raw.server, environment, &mut fields);
    let is_on = |leaf: &Leaf<bool>| leaf.as_ref().is_none_or(|given| given.value);
    let topology = Topology {
        model_path,
        dtype,
        max_model_len,
        served_model_name,
        devices,
        replicas,
        weights,
        threads_per_rank,
        cpu_isa,
        batch_invariant: raw.parallel.batch_invariant.as_ref().map(|given| given.value),
        isolation,
        all_reduce,
        block_size,
        kv_cache_memory_bytes,
        kv_offloading_bytes,
        gpu_memory_utilization,
        enable_prefix_caching: is_on(&raw.cache.enable_prefix_caching),
        salt_per_api_key: is_on(&raw.cache.salt_per_api_key),
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting_requests,
        priority_aging_ms,
        async_scheduling: is_on(&raw.scheduler.async_scheduling),
        listen,
        api_key_env,
        api_keys,
        max_body_bytes,
        origins,
    };
    let violations = fields.violations;
    if violations.is_empty() {
        return Ok(topology);
    }
    let doubtful = violations.doubtful();
    let has_model =
        !violations.is_unread() && !doubtful.iter().any(|key| matches!(key.as_str(), "model" | "model.path"));
    let rest = has_model.then(|| Box::new(Rest { topology, doubtful }));
    Err(Broken { error: violations.into_error(), rest })
}

fn cache(raw: &RawCache, fields: &mut Fields) -> (usize, Option<u64>, Option<u64>, f64) {
    let block_size = fields.count("cache.block_size", &raw.block_size, BLOCK_SIZE, BLOCK_SIZE_MAX);
    if let Some(given) = &raw.block_size
        && (1..=BLOCK_SIZE_MAX).contains(&given.value)
        && given.value % 16 != 0
    {
        let problem = format!("{} is not a multiple of 16", given.value);
        fields.violations.add("cache.block_size", &given.origin, problem, "use 16 or 32");
    }
    let bytes = fields.bytes("cache.kv_cache_memory_bytes", &raw.kv_cache_memory_bytes, KV_BYTES_MAX);
    let offloading = fields.bytes("cache.kv_offloading_bytes", &raw.kv_offloading_bytes, KV_BYTES_MAX);
    let mut utilization = GPU_MEMORY_UTILIZATION;
    if let Some(given) = &raw.gpu_memory_utilization {
        utilization = given.value;
        if !(utilization > 0.0 && utilization <= 1.0) {
            let problem = format!("{utilization:?} is no part of a GPU's memory");
            let remedy = "give a number above 0 and at most 1";
            fields.violations.add("cache.gpu_memory_utilization", &given.origin, problem, remedy);
        }
    }
    (block_size, bytes, offloading, utilization)
}

fn scheduler(raw: &RawScheduler, fields: &mut Fields) -> (usize, usize, usize) {
    // Every running sequence needs its token in a step, so a bound that is given pulls the other's default
    // along.
    let tokens_given = raw.max_num_batched_tokens.as_ref().map(|given| given.value);
    let seqs_given = raw.max_num_seqs.as_ref().map(|given| given.value);
    let seqs_default = tokens_given.map_or(MAX_NUM_SEQS, |tokens| MAX_NUM_SEQS.min(tokens.max(1)));
    let tokens_default = seqs_given.map_or(MAX_NUM_BATCHED_TOKENS, |seqs| MAX_NUM_BATCHED_TOKENS.max(seqs));
    let seqs = fields.count("scheduler.max_num_seqs", &raw.max_num_seqs, seqs_default, SEQUENCES_MAX);
    let tokens_key = "scheduler.max_num_batched_tokens";
    let tokens = fields.count(tokens_key, &raw.max_num_batched_tokens, tokens_default, BATCHED_TOKENS_MAX);
    if let (Some(given), true) = (&raw.max_num_batched_tokens, tokens < seqs) {
        let problem = format!("{tokens} tokens a step cannot carry max_num_seqs = {seqs} sequences");
        let remedy = format!("raise it to {seqs} or more, or lower scheduler.max_num_seqs");
        match &raw.max_num_seqs {
            Some(other) => {
                let note = (&other.origin, format!("{seqs} sequences are asked for here"));
                fields.violations.add_clash((tokens_key, &given.origin), problem, remedy, note);
            }
            None => fields.violations.add(tokens_key, &given.origin, problem, remedy),
        }
    }
    let waiting_key = "scheduler.max_waiting_requests";
    let waiting = fields.count(waiting_key, &raw.max_waiting_requests, MAX_WAITING_REQUESTS, WAITING_MAX);
    (seqs, tokens, waiting)
}

/// Unlike the bounds beside it, this may be 0.
fn priority_aging_ms(raw: &RawScheduler, violations: &mut Violations) -> u64 {
    let Some(given) = &raw.priority_aging_ms else { return PRIORITY_AGING_MS };
    if (0..=PRIORITY_AGING_MS_MAX).contains(&given.value) {
        return given.value.unsigned_abs();
    }
    let problem = format!("{} is out of range", given.value);
    let remedy =
        format!("give a whole number from 0 (priorities have no effect) to {PRIORITY_AGING_MS_MAX} (a day)");
    violations.add("scheduler.priority_aging_ms", &given.origin, problem, remedy);
    PRIORITY_AGING_MS
}

fn server(
    raw: &RawServer,
    environment: &Environment,
    fields: &mut Fields,
) -> (ListenAddress, Option<String>, Vec<ApiKey>, usize) {
    let listen = listen::listen(raw, &mut fields.violations);
    let body =
        fields.bytes("server.max_body_bytes", &raw.max_body_bytes, BODY_BYTES_MAX).unwrap_or(MAX_BODY_BYTES);
    let environment = (!raw.is_elsewhere).then_some(environment);
    let keys = raw.api_key_env.as_ref().map(|name| api_keys(name, environment, &mut fields.violations));
    (
        listen,
        raw.api_key_env.as_ref().map(|name| name.value.clone()),
        keys.unwrap_or_default(),
        usize::try_from(body).unwrap_or(usize::MAX),
    )
}

/// The keys that the named variable holds; none without an environment to look in. Serving without the keys that were
/// asked for would open the server to everyone.
fn api_keys(
    name: &Sourced<String>,
    environment: Option<&Environment>,
    violations: &mut Violations,
) -> Vec<ApiKey> {
    let key = "server.api_key_env";
    if !is_variable_name(&name.value) {
        // Probably the key itself: it is not repeated here.
        let problem = "this is not the name of an environment variable";
        let remedy = "put the key into a variable, and give the variable's name, such as \"API_KEY\"";
        violations.add(key, &name.origin, problem, remedy);
        return Vec::new();
    }
    let Some(environment) = environment else { return Vec::new() };
    // A name like this may be the key itself.
    let variable = match is_plain_name(&name.value) {
        true => format!("the environment variable {}", name.value),
        false => "the environment variable of this name".to_owned(),
    };
    let Some(value) = environment.get(&name.value).filter(|value| !value.trim().is_empty()) else {
        let state = if environment.is_not_unicode(&name.value) { "not Unicode" } else { "unset or empty" };
        let remedy = "set it to the API key, or remove api_key_env to serve without one";
        violations.add(key, &name.origin, format!("{variable} is {state}"), remedy);
        return Vec::new();
    };
    let mut keys = Vec::new();
    for given in value.split(',').map(str::trim) {
        let given = ApiKey(given.to_owned());
        if given.0.is_empty() {
            let problem = format!("{variable} has a comma without a key on both sides of it");
            violations.add(
                key,
                &name.origin,
                problem,
                "set it to the API keys, with a comma between each two",
            );
            return Vec::new();
        }
        if !keys.contains(&given) {
            keys.push(given);
        }
    }
    keys
}
