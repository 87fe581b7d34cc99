//! What to run where: TOML, environment and command line, checked into one value.
//!
//! Precedence is command line > environment (`CONSORT_SECTION__KEY`) > file > default. Every layer is read
//! strictly: unknown names and wrong types are errors with a place, and with what was probably meant. All violations
//! are reported together, in the order of the file. [`Topology::to_toml`] writes what came of it, and
//! [`EngineBuilder::effective_config`](crate::EngineBuilder::effective_config) says where each value is from.
//!
//! ```toml
//! [model]
//! path = "models/SmolLM2-135M-Instruct.Q4_1.gguf"   # folder or GGUF file; relative to this file
//! dtype = "bfloat16"
//! [parallel]
//! tensor_parallel_size = 3
//! data_parallel_size = 1                            # replicas, each with all ranks
//! [[node]]
//! devices = ["cpu", "cpu", "cpu"]                   # or "cuda:0", ..., or "cuda:GPU-UUID"
//! [cache]
//! kv_cache_memory_bytes = "512MiB"                  # over all ranks of a replica
//! kv_offloading_bytes = "2GiB"                      # host memory for evicted blocks, of a replica; none by default
//! [server]
//! listen = "127.0.0.1:8000"
//! ```
//!
//! Two types, raw and validated: [`Topology`] cannot hold a value that breaks a rule. Nothing here opens a
//! model.

mod builder;
mod device;
mod env;
mod error;
mod excerpt;
mod origins;
mod overrides;
mod parse;
mod raw;
mod schema;
mod secrets;
mod suggest;
#[cfg(test)]
mod tests;
pub(crate) mod units;
mod validate;
mod value;
mod write;

use std::{
    fmt,
    path::{Path, PathBuf},
};

use consort_kernels::device::Isa;
pub use consort_parallel::model::AllReduce;

pub use self::{
    builder::TopologyBuilder,
    device::{CudaCard, DeviceSpec, GpuUuid},
    env::Environment,
    error::{TopologyError, Violation},
    overrides::Overrides,
};
use self::{error::Violations, excerpt::Place, origins::Origins, raw::RawTopology};
pub(crate) use self::{
    excerpt::{shown_path, shown_whole},
    schema::{is_key_name_variable, isa_variables, setting_variables},
    secrets::is_plain_name,
    validate::{Broken, GPU_MEMORY_UTILIZATION, Rest},
    write::Computed,
};

/// Number format of weights and matrix inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DType {
    /// BF16 weights and matrix inputs, f32 sums.
    #[default]
    BFloat16,
    /// f32 throughout: for truth, not for speed.
    Float32,
    /// What the checkpoint stores: f32 for f32 checkpoints, BF16 for all others.
    Auto,
}

impl DType {
    /// The name that topologies use.
    pub fn name(self) -> &'static str {
        match self {
            DType::BFloat16 => "bfloat16",
            DType::Float32 => "float32",
            DType::Auto => "auto",
        }
    }
}

/// What separates ranks from each other and from the engine. Tokens are the same with either. Threads where nobody
/// says, but for `consort serve` on GPUs, whose ranks are processes then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// Nothing but supervision: ranks are threads of the engine's process.
    #[default]
    Thread,
    /// Each rank is a process of its own, so that a fault of one, or of its device, ends that rank alone.
    Process,
}

impl Isolation {
    /// The name that topologies use.
    pub fn name(self) -> &'static str {
        match self {
            Isolation::Thread => "thread",
            Isolation::Process => "process",
        }
    }
}

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    host: String,
    port: u16,
}

impl ListenAddress {
    /// Host name or address, IPv6 without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port; 0 takes a free one.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// A key that requests must bring. Never shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// The key itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

/// A validated description of one engine and its server.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    model_path: PathBuf,
    dtype: DType,
    max_model_len: Option<usize>,
    served_model_name: String,
    devices: Vec<DeviceSpec>,
    replicas: usize,
    weights: Option<Vec<f64>>,
    threads_per_rank: Option<usize>,
    cpu_isa: Option<Isa>,
    batch_invariant: Option<bool>,
    isolation: Isolation,
    all_reduce: AllReduce,
    block_size: usize,
    kv_cache_memory_bytes: Option<u64>,
    kv_offloading_bytes: Option<u64>,
    gpu_memory_utilization: f64,
    enable_prefix_caching: bool,
    salt_per_api_key: bool,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_waiting_requests: usize,
    priority_aging_ms: u64,
    async_scheduling: bool,
    listen: ListenAddress,
    api_key_env: Option<String>,
    api_keys: Vec<ApiKey>,
    max_body_bytes: usize,
    origins: Origins,
}

impl Topology {
    /// Reads a topology file, under the process's environment and these overrides.
    pub fn load(path: &Path, overrides: &Overrides) -> Result<Topology, TopologyError> {
        Topology::load_with(path, overrides, &Environment::of_process())
    }

    /// [`load`](Self::load) with an environment of the caller's.
    pub fn load_with(
        path: &Path,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, TopologyError> {
        Ok(Topology::load_or_rest(path, overrides, environment)?)
    }

    /// [`load_with`](Self::load_with), with what is left where rules are broken.
    pub(crate) fn load_or_rest(
        path: &Path,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, Broken> {
        let text = parse::read(path)?;
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Topology::from_text(&text, &path.display().to_string(), folder, overrides, environment)
    }

    /// A topology given as text, under the process's environment and these overrides. Relative paths resolve
    /// against the current directory.
    pub fn from_toml_str(text: &str, overrides: &Overrides) -> Result<Topology, TopologyError> {
        Topology::from_toml_str_with(text, overrides, &Environment::of_process())
    }

    /// [`from_toml_str`](Self::from_toml_str) with an environment of the caller's.
    pub fn from_toml_str_with(
        text: &str,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, TopologyError> {
        Ok(Topology::from_text(text, "topology", PathBuf::new(), overrides, environment)?)
    }

    /// A model and defaults for everything else, under the process's environment and these overrides.
    pub fn from_model(model: &Path, overrides: &Overrides) -> Result<Topology, TopologyError> {
        Topology::from_model_with(model, overrides, &Environment::of_process())
    }

    /// [`from_model`](Self::from_model) with an environment of the caller's.
    pub fn from_model_with(
        model: &Path,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, TopologyError> {
        Ok(Topology::from_model_or_rest(model, overrides, environment)?)
    }

    /// [`from_model_with`](Self::from_model_with), with what is left where rules are broken.
    pub(crate) fn from_model_or_rest(
        model: &Path,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, Broken> {
        let mut raw = RawTopology::default();
        let mut violations = Violations::default();
        overrides::apply(&mut raw, overrides, environment, &mut violations);
        // The model was named in so many words, so an environment variable does not replace it;
        // `overrides.model` does.
        if overrides.model.is_none() {
            raw.model.path = None;
            validate::model::named(model, "the model argument", &mut raw, &mut violations);
        }
        validate::validate(raw, Path::new(""), environment, violations)
    }

    /// Starts a topology in code.
    pub fn builder(model: impl Into<PathBuf>) -> TopologyBuilder {
        TopologyBuilder::new(model.into())
    }

    fn from_text(
        text: &str,
        name: &str,
        folder: PathBuf,
        overrides: &Overrides,
        environment: &Environment,
    ) -> Result<Topology, Broken> {
        let mut violations = Violations::of_file(name, text);
        // Of a file that is no TOML, flags and variables can be checked nevertheless.
        let mut raw = parse::parse(text, &mut violations).unwrap_or_default();
        overrides::apply(&mut raw, overrides, environment, &mut violations);
        validate::validate(raw, &folder, environment, violations)
    }

    /// Folder or GGUF file of the model; it existed when the topology was checked.
    pub fn model_path(&self) -> &Path {
        &self.model_path
    }

    /// Number format to compute in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Longest sequence in tokens; the model's own limit where absent.
    pub fn max_model_len(&self) -> Option<usize> {
        self.max_model_len
    }

    /// Name that clients use; the file's or folder's name unless given.
    pub fn served_model_name(&self) -> &str {
        &self.served_model_name
    }

    /// Ranks that each replica of the model is split over.
    pub fn tensor_parallel_size(&self) -> usize {
        self.devices.len() / self.replicas
    }

    /// Replicas of the model: requests go to the one that holds their prefix, unless another has less to do.
    pub fn data_parallel_size(&self) -> usize {
        self.replicas
    }

    /// Device of each rank, in rank order, replica by replica: rank r of replica k is on device
    /// `k * tensor_parallel_size + r`.
    pub fn devices(&self) -> &[DeviceSpec] {
        &self.devices
    }

    /// Devices of each replica, in rank order.
    pub fn replica_devices(&self) -> impl Iterator<Item = &[DeviceSpec]> {
        self.devices.chunks_exact(self.tensor_parallel_size())
    }

    /// Relative share of each rank of a replica, where shares are not to be equal; as many as ranks.
    pub fn weights(&self) -> Option<&[f64]> {
        self.weights.as_deref()
    }

    /// Compute threads of each rank; the engine divides the cores where absent.
    pub fn threads_per_rank(&self) -> Option<usize> {
        self.threads_per_rank
    }

    /// Instruction set of CPU ranks; the best of the machine where absent.
    pub fn cpu_isa(&self) -> Option<Isa> {
        self.cpu_isa
    }

    /// Whether a request's tokens must not depend on what else runs. On CPUs they never do; on GPUs it costs speed, and
    /// is off unless asked for.
    pub fn batch_invariant(&self) -> bool {
        self.is_on_cpus() || self.batch_invariant.unwrap_or(false)
    }

    /// What separates ranks from each other and from the engine.
    pub fn isolation(&self) -> Isolation {
        self.isolation
    }

    /// What ranks on GPUs sum with.
    pub fn all_reduce(&self) -> AllReduce {
        self.all_reduce
    }

    /// Whether all ranks are on the host's processor.
    pub(crate) fn is_on_cpus(&self) -> bool {
        self.devices.iter().all(DeviceSpec::is_cpu)
    }

    /// Tokens of one KV block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Memory for keys and values over all ranks of a replica; the engine chooses where absent.
    pub fn kv_cache_memory_bytes(&self) -> Option<u64> {
        self.kv_cache_memory_bytes
    }

    /// Memory of the host, over all ranks, for blocks that lose their place in the cache; none where absent.
    pub fn kv_offloading_bytes(&self) -> Option<u64> {
        self.kv_offloading_bytes
    }

    /// Part of a GPU's memory that may be used. Without effect on CPUs.
    pub fn gpu_memory_utilization(&self) -> f64 {
        self.gpu_memory_utilization
    }

    /// Whether the keys and values of what was computed are kept for requests that begin alike.
    pub fn enable_prefix_caching(&self) -> bool {
        self.enable_prefix_caching
    }

    /// Whether requests with different API keys share no prefixes, where several keys exist.
    pub fn salt_per_api_key(&self) -> bool {
        self.salt_per_api_key
    }

    /// Sequences that run at a time, at most.
    pub fn max_num_seqs(&self) -> usize {
        self.max_num_seqs
    }

    /// Tokens of one step, at most.
    pub fn max_num_batched_tokens(&self) -> usize {
        self.max_num_batched_tokens
    }

    /// Requests that may wait before further ones are refused.
    pub fn max_waiting_requests(&self) -> usize {
        self.max_waiting_requests
    }

    /// How much earlier a request must have come, in milliseconds, to go before one whose priority is better by one.
    /// With 0 the order is that of arrival.
    pub fn priority_aging_ms(&self) -> u64 {
        self.priority_aging_ms
    }

    /// Whether the next step is planned and enqueued while a device computes one.
    pub fn async_scheduling(&self) -> bool {
        self.async_scheduling
    }

    /// Where the server listens.
    pub fn listen(&self) -> &ListenAddress {
        &self.listen
    }

    /// Name of the environment variable that holds the API keys.
    pub fn api_key_env(&self) -> Option<&str> {
        self.api_key_env.as_deref()
    }

    /// Keys of which requests to `/v1/*` must bring one, each once; none where no key is asked for.
    pub fn api_keys(&self) -> &[ApiKey] {
        &self.api_keys
    }

    /// Largest request body in bytes.
    pub fn max_body_bytes(&self) -> usize {
        self.max_body_bytes
    }

    /// The settled values as a topology file; API keys are never written, only the name of their variable.
    pub fn to_toml(&self) -> String {
        write::plain(self)
    }

    /// [`to_toml`](Self::to_toml) with what the engine computed filled in, and the origin of each value in a comment.
    pub(crate) fn to_annotated_toml(&self, computed: &Computed) -> String {
        write::annotated(self, computed)
    }

    /// Where a key's value was given: `file:line:column`, an environment variable, or a flag. `None` where it is a
    /// default.
    pub fn origin(&self, key: &str) -> Option<&str> {
        self.origins.of_key(key).map(|place| place.name.as_str())
    }

    /// A violation of a rule that only the model can tell, at the first of `keys` that somebody gave; against the
    /// value of another key, if somebody gave that.
    pub(crate) fn violation(
        &self,
        keys: &[&str],
        problem: String,
        remedy: String,
        other: Option<(&str, &str)>,
    ) -> Violation {
        let given = keys.iter().find_map(|key| Some((*key, self.origins.of_key(key)?.clone())));
        let first = keys.first().copied().unwrap_or("topology");
        let (key, at) = given.unwrap_or_else(|| (first, Place::outside("the default".to_owned())));
        let other = other.and_then(|(key, note)| Some((self.origins.of_key(key)?.clone(), note.to_owned())));
        Violation::new(key, at, problem, remedy).against(other)
    }
}

/// Violations as one error.
pub(crate) fn invalid(violations: Vec<Violation>) -> TopologyError {
    error::invalid(violations)
}
