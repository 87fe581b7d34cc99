//! What stands above the file: environment variables, and above them the command line.

use std::collections::HashMap;

use config::{Config, Map, Value, ValueKind};
use consort_kernels::device::Isa;

use super::{
    env::Environment,
    error::Violations,
    excerpt::shown,
    raw::{Origin, RawServer, RawTopology},
    schema::{CPU_ISA_VARIABLE, KEYS, Key},
    suggest, value,
};

const PREFIX: &str = "CONSORT";
const SEPARATOR: &str = "__";
const SERVER: &str = "server";

/// Values of the command line. Each one given wins over environment and file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// Replaces `model.path`.
    pub model: Option<String>,
    /// Replaces `model.served_model_name`.
    pub served_model_name: Option<String>,
    /// Replaces `model.dtype`.
    pub dtype: Option<String>,
    /// Replaces `model.max_model_len`.
    pub max_model_len: Option<usize>,
    /// Replaces `parallel.tensor_parallel_size`, and all `[[node]]` of lower layers that list another number of CPU
    /// devices. Where they list GPUs it is refused: which of them, `devices` must say.
    pub tensor_parallel_size: Option<usize>,
    /// Replaces `parallel.data_parallel_size`. Where devices are listed, they must do for that many replicas.
    pub data_parallel_size: Option<usize>,
    /// Replaces `parallel.weights`: numbers with commas between.
    pub weights: Option<String>,
    /// Replaces `parallel.threads_per_rank`.
    pub threads_per_rank: Option<usize>,
    /// Replaces `parallel.cpu_isa`.
    pub cpu_isa: Option<String>,
    /// Replaces `parallel.batch_invariant`.
    pub batch_invariant: Option<bool>,
    /// Replaces `parallel.isolation`.
    pub isolation: Option<String>,
    /// Has ranks on GPUs be processes where nobody says what separates ranks, as `consort serve` does. Programs that
    /// embed an engine must do something for that, so they ask for it.
    pub isolates_gpus: bool,
    /// Replaces `parallel.all_reduce`.
    pub all_reduce: Option<String>,
    /// Replaces all `[[node]]` by one with these `devices`, with commas between, and the number of ranks of lower
    /// layers.
    pub devices: Option<String>,
    /// Replaces `cache.block_size`.
    pub block_size: Option<usize>,
    /// Replaces `cache.kv_cache_memory_bytes`: bytes, or an amount with a unit.
    pub kv_cache_memory_bytes: Option<String>,
    /// Replaces `cache.kv_offloading_bytes`: bytes, or an amount with a unit.
    pub kv_offloading_bytes: Option<String>,
    /// Replaces `cache.gpu_memory_utilization`.
    pub gpu_memory_utilization: Option<f64>,
    /// Replaces `cache.enable_prefix_caching`.
    pub enable_prefix_caching: Option<bool>,
    /// Replaces `cache.salt_per_api_key`.
    pub salt_per_api_key: Option<bool>,
    /// Replaces `scheduler.max_num_seqs`.
    pub max_num_seqs: Option<usize>,
    /// Replaces `scheduler.max_num_batched_tokens`.
    pub max_num_batched_tokens: Option<usize>,
    /// Replaces `scheduler.max_waiting_requests`.
    pub max_waiting_requests: Option<usize>,
    /// Replaces `scheduler.priority_aging_ms`.
    pub priority_aging_ms: Option<u64>,
    /// Replaces `scheduler.async_scheduling`.
    pub async_scheduling: Option<bool>,
    /// Replaces the host of `server.listen`.
    pub host: Option<String>,
    /// Replaces the port of `server.listen`.
    pub port: Option<u16>,
    /// Replaces `server.api_key_env`.
    pub api_key_env: Option<String>,
    /// Replaces `server.max_body_bytes`: bytes, or an amount with a unit.
    pub max_body_bytes: Option<String>,
    /// Leaves `[server]` out, whoever wrote it: for an engine that nothing listens for, which must not fail on a key
    /// that it does not need.
    pub without_server: bool,
    /// Leaves `[server]` as the file has it, without what the environment says of it, and looks for no keys: for one
    /// who writes the topology for another machine. Has no effect beside `without_server`.
    pub server_as_written: bool,
}

impl Overrides {
    /// Whether the environment has no say in `[server]`.
    fn is_server_apart(&self) -> bool {
        self.without_server || self.server_as_written
    }

    /// Flags with their values as text.
    fn entries(&self) -> Vec<(&'static str, String)> {
        fn text<T: ToString>(value: &Option<T>) -> Option<String> {
            value.as_ref().map(ToString::to_string)
        }
        let all = [
            ("--model", self.model.clone()),
            ("--served-model-name", self.served_model_name.clone()),
            ("--dtype", self.dtype.clone()),
            ("--max-model-len", text(&self.max_model_len)),
            ("--tensor-parallel-size", text(&self.tensor_parallel_size)),
            ("--data-parallel-size", text(&self.data_parallel_size)),
            ("--weights", self.weights.clone()),
            ("--threads-per-rank", text(&self.threads_per_rank)),
            ("--cpu-isa", self.cpu_isa.clone()),
            ("--batch-invariant", text(&self.batch_invariant)),
            ("--isolation", self.isolation.clone()),
            ("--all-reduce", self.all_reduce.clone()),
            ("--devices", self.devices.clone()),
            ("--block-size", text(&self.block_size)),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes.clone()),
            ("--kv-offloading-bytes", self.kv_offloading_bytes.clone()),
            ("--gpu-memory-utilization", text(&self.gpu_memory_utilization)),
            ("--enable-prefix-caching", text(&self.enable_prefix_caching)),
            ("--salt-per-api-key", text(&self.salt_per_api_key)),
            ("--max-num-seqs", text(&self.max_num_seqs)),
            ("--max-num-batched-tokens", text(&self.max_num_batched_tokens)),
            ("--max-waiting-requests", text(&self.max_waiting_requests)),
            ("--priority-aging-ms", text(&self.priority_aging_ms)),
            ("--async-scheduling", text(&self.async_scheduling)),
            ("--host", self.host.clone()),
            ("--port", text(&self.port)),
            ("--api-key-env", self.api_key_env.clone()),
            ("--max-body-bytes", self.max_body_bytes.clone()),
        ];
        all.into_iter().filter_map(|(flag, value)| Some((flag, value?))).collect()
    }
}

/// Lays environment and overrides over a raw topology.
pub(super) fn apply(
    raw: &mut RawTopology,
    overrides: &Overrides,
    environment: &Environment,
    violations: &mut Violations,
) {
    let flags: Vec<(&'static Key, String)> = overrides
        .entries()
        .into_iter()
        .filter_map(|(flag, value)| Some((KEYS.iter().find(|key| key.flag == Some(flag))?, value)))
        .collect();
    let mut variables = HashMap::new();
    let key_variable = key_variable(raw, overrides, environment);
    for (name, value) in settings(environment) {
        if overrides.is_server_apart() && is_of_server(name) {
            continue;
        }
        match KEYS.iter().find(|key| key.in_environment && key.variable() == name) {
            Some(_) => drop(variables.insert(name.to_owned(), value.to_owned())),
            None if key_variable.as_deref() == Some(name) => {}
            None => unknown_variable(name, value, overrides.is_server_apart(), violations),
        }
    }
    let is_flag = |name: &str| flags.iter().any(|(key, _)| key.name == name);
    not_unicode(environment, overrides, is_flag, violations);
    // Where a flag decides, it does not matter what two variables say of it.
    let short_isa = !is_flag("parallel.cpu_isa") && cpu_isa(environment, &mut variables, violations);
    let merged = match layered(&flags, variables) {
        Ok(merged) => merged,
        Err(error) => {
            let origin = Origin::Given("environment".to_owned());
            violations.add("environment", &origin, error.to_string(), "correct the CONSORT_* variables");
            return;
        }
    };
    for (name, text) in merged {
        let Some(key) = KEYS.iter().find(|key| key.name == name) else { continue };
        if overrides.without_server && key.parts().0 == SERVER {
            continue;
        }
        let origin = match flags.iter().find(|(given, _)| given.name == name) {
            Some((key, _)) => Origin::Given(key.flag.unwrap_or(key.name).to_owned()),
            None if short_isa && key.name == "parallel.cpu_isa" => {
                Origin::Variable(CPU_ISA_VARIABLE.to_owned())
            }
            None => Origin::Variable(key.variable()),
        };
        if let Some(slot) = raw.slot(key.name) {
            value::of_text(slot, key.name, text, origin, violations);
        }
    }
    raw.parallel.isolates_gpus = overrides.isolates_gpus;
    if overrides.without_server {
        raw.server = RawServer::default();
    }
    raw.server.is_elsewhere = overrides.server_as_written;
}

/// The variables that are ours and not empty, in order.
fn settings(environment: &Environment) -> impl Iterator<Item = (&str, &str)> {
    environment.iter().filter(|(name, value)| {
        name.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with('_')) && !value.is_empty()
    })
}

/// Lets the short name stand for the long one; both may be set if they agree. Whether the short one decides.
fn cpu_isa(
    environment: &Environment,
    variables: &mut HashMap<String, String>,
    violations: &mut Violations,
) -> bool {
    let Some(short) = environment.get(CPU_ISA_VARIABLE).filter(|value| !value.is_empty()) else {
        return false;
    };
    let long = format!("{PREFIX}_PARALLEL{SEPARATOR}CPU_ISA");
    match variables.get(&long) {
        None => {
            variables.insert(long, short.to_owned());
            true
        }
        Some(other) => {
            if meaning(other) != meaning(short) {
                let (origin, other_origin) =
                    (Origin::Variable(CPU_ISA_VARIABLE.to_owned()), Origin::Variable(long));
                violations.add_clash(
                    ("parallel.cpu_isa", &origin),
                    format!(
                        "`{}` here, but `{}` in another variable for the same key",
                        shown(short),
                        shown(other)
                    ),
                    "unset one of the two".to_owned(),
                    (&other_origin, "the other one is here".to_owned()),
                );
            }
            false
        }
    }
}

/// What an instruction set's name stands for, however it is spelt.
fn meaning(isa: &str) -> Result<Isa, String> {
    let name = isa.trim();
    name.parse::<Isa>().map_err(|_| name.to_lowercase())
}

/// The name of the variable that holds the API key, from the highest layer that says so.
fn key_variable(raw: &RawTopology, overrides: &Overrides, environment: &Environment) -> Option<String> {
    let variable = format!("{PREFIX}_SERVER{SEPARATOR}API_KEY_ENV");
    let of_environment = environment.get(&variable).filter(|name| !name.is_empty()).map(str::to_owned);
    let of_file = || raw.server.api_key_env.as_ref().map(|given| given.value.clone());
    overrides.api_key_env.clone().or(of_environment).or_else(of_file)
}

fn is_of_server(variable: &str) -> bool {
    variable.strip_prefix("CONSORT_SERVER_").is_some()
}

/// Tells of settings whose values are no text. Others of that kind are none of ours.
fn not_unicode(
    environment: &Environment,
    overrides: &Overrides,
    is_flag: impl Fn(&str) -> bool,
    violations: &mut Violations,
) {
    for name in environment.not_unicode() {
        let is_short = |key: &Key| name == CPU_ISA_VARIABLE && key.name == "parallel.cpu_isa";
        let key = KEYS.iter().find(|key| key.in_environment && (key.variable() == name || is_short(key)));
        let Some(key) = key else { continue };
        if is_flag(key.name) || overrides.is_server_apart() && key.parts().0 == SERVER {
            continue;
        }
        let origin = Origin::Variable(name.to_owned());
        violations.add(key.name, &origin, "its value is not Unicode", "set it to text in UTF-8, or unset it");
    }
}

/// What a variable of our prefix that is no setting probably is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// Something else: the variable of an API key, say, or what a container platform sets for a service of our name
    /// (`CONSORT_PORT=tcp://10.0.0.1:8000`).
    Foreign,
    /// Perhaps a setting, misspelt: whoever looks for the reason why it has no effect should find it.
    Doubtful(String),
    /// A setting that does not exist; what was meant, if that is known.
    Setting(Option<String>),
}

/// Tells of a variable that looks like a setting and is none.
fn unknown_variable(name: &str, value: &str, is_server_apart: bool, violations: &mut Violations) {
    // The topology that could not be read may have named it.
    if violations.is_unread() && violations.mentions(name) {
        return;
    }
    let remedy = match judge(name, value) {
        Unknown::Foreign => return,
        Unknown::Doubtful(meant) | Unknown::Setting(Some(meant))
            if is_server_apart && is_of_server(&meant) =>
        {
            return;
        }
        Unknown::Doubtful(meant) => {
            tracing::warn!("the environment variable {} has no effect; did you mean {meant}?", shown(name));
            return;
        }
        Unknown::Setting(Some(meant)) => format!("did you mean {meant}?"),
        Unknown::Setting(None) => {
            "unset it, or correct its spelling: CONSORT_SECTION__KEY, section and key as in the topology file"
                .into()
        }
    };
    let rest = name.strip_prefix("CONSORT_").unwrap_or(name);
    let key = rest.replace(SEPARATOR, ".").to_lowercase();
    let origin = Origin::Variable(shown(name));
    violations.add(shown(&key), &origin, "no setting has this name", remedy);
}

pub(super) fn judge(name: &str, value: &str) -> Unknown {
    let Some(rest) = name.strip_prefix("CONSORT_") else { return Unknown::Foreign };
    // Of links between containers, the last are the variables of the other one.
    let of_port = ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| {
        let port = name.rsplit_once("_PORT_").map(|(_, rest)| rest);
        port.and_then(|rest| rest.split_once(protocol))
            .is_some_and(|(number, _)| number.parse::<u16>().is_ok())
    });
    let is_service_link = value.contains("://")
        || of_port
        || name.contains("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || rest.starts_with("ENV_");
    if name == CPU_ISA_VARIABLE || is_service_link {
        return Unknown::Foreign;
    }
    let plain = rest.replace('_', "").to_lowercase();
    let settable = || KEYS.iter().filter(|key| key.in_environment);
    // Section and key as they are, but for the underscores: nothing else has such a name.
    let squeezed = settable().find(|key| key.name.replace(['_', '.'], "") == plain);
    if let Some(key) = squeezed {
        return Unknown::Setting(Some(key.variable()));
    }
    if rest.contains(SEPARATOR) {
        return Unknown::Setting(meant_variable(&plain));
    }
    let foreign = suggest::foreign_variable(rest);
    let foreign = foreign.and_then(|name| settable().find(|key| key.name == name)).map(Key::variable);
    foreign.or_else(|| meant_variable(&plain)).map_or(Unknown::Foreign, Unknown::Doubtful)
}

/// The variable that was probably meant, by a name without underscores: letters mixed up or the section left out are
/// usual.
fn meant_variable(plain: &str) -> Option<String> {
    let settable = KEYS.iter().filter(|key| key.in_environment);
    let spelt: Vec<(String, String)> = settable
        .flat_map(|key| {
            let (table, name) = key.parts();
            [format!("{table}{name}"), name.to_owned()]
                .map(|spelling| (spelling.replace('_', ""), key.variable()))
        })
        .chain([("cpuisa".to_owned(), CPU_ISA_VARIABLE.to_owned())])
        .collect();
    // The short name of a key comes last among equals, so that CONSORT_CPU_ISE means CONSORT_CPU_ISA.
    // Stricter than for keys: variables of that prefix need not be settings.
    let allowed = (plain.len() / 4).min(2);
    let near = suggest::within(allowed, plain, spelt.iter().rev().map(|(spelling, _)| spelling.as_str()))?;
    spelt.iter().rev().find(|(spelling, _)| spelling == near).map(|(_, variable)| variable.clone())
}

/// The values of environment and flags by key, a flag above its variable.
fn layered(
    flags: &[(&'static Key, String)],
    variables: HashMap<String, String>,
) -> Result<Vec<(String, String)>, config::ConfigError> {
    let source = config::Environment::with_prefix(PREFIX)
        .prefix_separator("_")
        .separator(SEPARATOR)
        .source(Some(variables));
    let mut builder = Config::builder().add_source(source);
    for (key, value) in flags {
        builder = builder.set_override(key.name, value.as_str())?;
    }
    let merged: Map<String, Value> = builder.build()?.try_deserialize()?;
    let mut leaves = Vec::new();
    flatten("", merged, &mut leaves)?;
    leaves.sort();
    Ok(leaves)
}

fn flatten(
    prefix: &str,
    table: Map<String, Value>,
    leaves: &mut Vec<(String, String)>,
) -> Result<(), config::ConfigError> {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value.kind {
            ValueKind::Table(inner) => flatten(&key, inner, leaves)?,
            _ => leaves.push((key, value.into_string()?)),
        }
    }
    Ok(())
}
