//! The rules: a raw topology to a validated one, or every rule that it breaks.

mod devices;
mod fields;
mod listen;
pub(super) mod model;
pub(super) mod words;

use std::{collections::BTreeSet, path::Path};

use self::fields::Fields;
use super::{
    ApiKey, ListenAddress, Topology,
    env::Environment,
    error::{TopologyError, Violations},
    origins::Origins,
    raw::{RawCache, RawScheduler, RawServer, RawTopology, Sourced},
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
    if let Some(size) = &raw.parallel.data_parallel_size
        && size.value != 1
    {
        fields.violations.add(
            "parallel.data_parallel_size",
            &size.origin,
            format!("{} replicas: this version runs exactly one", size.value),
            "set it to 1 or remove it; start one server per replica instead",
        );
    }
    let devices = devices::devices(&raw.parallel.tensor_parallel_size, &raw.node, &mut fields);
    let weights = devices::weights(&raw, devices.len(), &mut fields.violations);
    let cpu_isa = words::cpu_isa(&raw.parallel.cpu_isa, &mut fields.violations);
    let threads_per_rank =
        fields.optional_count("parallel.threads_per_rank", &raw.parallel.threads_per_rank, THREADS_MAX);
    let (block_size, kv_cache_memory_bytes, kv_offloading_bytes, gpu_memory_utilization) =
        cache(&raw.cache, &mut fields);
    let (max_num_seqs, max_num_batched_tokens, max_waiting_requests) = scheduler(&raw.scheduler, &mut fields);
    let (listen, api_key_env, api_key, max_body_bytes) = server(&raw.server, environment, &mut fields);
    let topology = Topology {
        model_path,
        dtype,
        max_model_len,
        served_model_name,
        devices,
        weights,
        threads_per_rank,
        cpu_isa,
        batch_invariant: raw.parallel.batch_invariant.as_ref().map(|given| given.value),
        block_size,
        kv_cache_memory_bytes,
        kv_offloading_bytes,
        gpu_memory_utilization,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting_requests,
        listen,
        api_key_env,
        api_key,
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

fn server(
    raw: &RawServer,
    environment: &Environment,
    fields: &mut Fields,
) -> (ListenAddress, Option<String>, Option<ApiKey>, usize) {
    let listen = listen::listen(raw, &mut fields.violations);
    let body =
        fields.bytes("server.max_body_bytes", &raw.max_body_bytes, BODY_BYTES_MAX).unwrap_or(MAX_BODY_BYTES);
    let key = raw.api_key_env.as_ref().and_then(|name| api_key(name, environment, &mut fields.violations));
    (
        listen,
        raw.api_key_env.as_ref().map(|name| name.value.clone()),
        key,
        usize::try_from(body).unwrap_or(usize::MAX),
    )
}

/// The key that the named variable holds. Serving without the key that was asked for would open the server to everyone.
fn api_key(name: &Sourced<String>, environment: &Environment, violations: &mut Violations) -> Option<ApiKey> {
    let key = "server.api_key_env";
    if !is_variable_name(&name.value) {
        // Probably the key itself: it is not repeated here.
        let problem = "this is not the name of an environment variable";
        let remedy = "put the key into a variable, and give the variable's name, such as \"API_KEY\"";
        violations.add(key, &name.origin, problem, remedy);
        return None;
    }
    let value = environment.get(&name.value).filter(|value| !value.is_empty());
    if value.is_none() {
        let state = if environment.is_not_unicode(&name.value) { "not Unicode" } else { "unset or empty" };
        // A name like this may be the key itself.
        let problem = if is_plain_name(&name.value) {
            format!("the environment variable {} is {state}", name.value)
        } else {
            format!("the environment variable of this name is {state}")
        };
        let remedy = "set it to the API key, or remove api_key_env to serve without one";
        violations.add(key, &name.origin, problem, remedy);
    }
    value.map(|value| ApiKey(value.to_owned()))
}
