//! Who wins: the command line over the environment over the file over the default, for every key; and whose variables
//! the environment's are.

use super::{
    super::{
        Computed,
        overrides::{Unknown, judge},
        schema::KEYS,
        validate::words,
    },
    Environment, Overrides, Place,
};
use consort_kernels::device::Isa;

/// A key with a value for each layer, as TOML writes it: file, environment, flag.
type Case = (&'static str, [&'static str; 3]);

const CASES: [Case; 28] = [
    ("model.path", ["\"a.gguf\"", "\"b.gguf\"", "\"c.gguf\""]),
    ("model.dtype", ["\"float32\"", "\"auto\"", "\"bfloat16\""]),
    ("model.max_model_len", ["101", "102", "103"]),
    ("model.served_model_name", ["\"a\"", "\"b\"", "\"c\""]),
    ("parallel.tensor_parallel_size", ["2", "3", "4"]),
    ("parallel.data_parallel_size", ["2", "3", "4"]),
    ("parallel.weights", ["[1.0]", "[2.0]", "[3.0]"]),
    ("parallel.threads_per_rank", ["2", "3", "4"]),
    ("parallel.cpu_isa", ["\"auto\"", "\"portable\"", "\"auto\""]),
    ("parallel.batch_invariant", ["true", "false", "true"]),
    ("parallel.isolation", ["\"process\"", "\"thread\"", "\"process\""]),
    ("parallel.all_reduce", ["\"kernels\"", "\"nccl\"", "\"auto\""]),
    ("node.devices", ["[\"cpu:1\"]", "[\"cpu:2\"]", "[\"cpu:3\"]"]),
    ("cache.block_size", ["32", "48", "64"]),
    ("cache.kv_cache_memory_bytes", ["1001", "1002", "1003"]),
    ("cache.kv_offloading_bytes", ["2001", "2002", "2003"]),
    ("cache.gpu_memory_utilization", ["0.1", "0.2", "0.3"]),
    ("cache.enable_prefix_caching", ["false", "true", "false"]),
    ("cache.salt_per_api_key", ["false", "true", "false"]),
    ("scheduler.max_num_seqs", ["1", "2", "3"]),
    ("scheduler.max_num_batched_tokens", ["301", "302", "303"]),
    ("scheduler.max_waiting_requests", ["1", "2", "3"]),
    ("scheduler.priority_aging_ms", ["0", "1", "2"]),
    ("scheduler.async_scheduling", ["false", "true", "false"]),
    ("server.api_key_env", ["\"A\"", "\"B\"", "\"C\""]),
    ("server.max_body_bytes", ["1001", "1002", "1003"]),
    ("server.host", ["\"a:8000\"", "\"b\"", "\"c\""]),
    ("server.port", ["\"127.0.0.1:1\"", "2", "3"]),
];

fn set(overrides: &mut Overrides, key: &str, value: &str) {
    let text = || Some(value.to_owned());
    let number = || Some(value.parse().unwrap());
    match key {
        "model.path" => overrides.model = text(),
        "model.dtype" => overrides.dtype = text(),
        "model.max_model_len" => overrides.max_model_len = number(),
        "model.served_model_name" => overrides.served_model_name = text(),
        "parallel.tensor_parallel_size" => overrides.tensor_parallel_size = number(),
        "parallel.data_parallel_size" => overrides.data_parallel_size = number(),
        "parallel.weights" => overrides.weights = text(),
        "parallel.threads_per_rank" => overrides.threads_per_rank = number(),
        "parallel.cpu_isa" => overrides.cpu_isa = text(),
        "parallel.batch_invariant" => overrides.batch_invariant = Some(value.parse().unwrap()),
        "parallel.isolation" => overrides.isolation = text(),
        "parallel.all_reduce" => overrides.all_reduce = text(),
        "node.devices" => overrides.devices = text(),
        "cache.block_size" => overrides.block_size = number(),
        "cache.kv_cache_memory_bytes" => overrides.kv_cache_memory_bytes = text(),
        "cache.kv_offloading_bytes" => overrides.kv_offloading_bytes = text(),
        "cache.gpu_memory_utilization" => overrides.gpu_memory_utilization = Some(value.parse().unwrap()),
        "cache.enable_prefix_caching" => {
            overrides.enable_prefix_caching = Some(value.parse().unwrap());
        }
        "cache.salt_per_api_key" => overrides.salt_per_api_key = Some(value.parse().unwrap()),
        "scheduler.max_num_seqs" => overrides.max_num_seqs = number(),
        "scheduler.max_num_batched_tokens" => overrides.max_num_batched_tokens = number(),
        "scheduler.max_waiting_requests" => overrides.max_waiting_requests = number(),
        "scheduler.async_scheduling" => overrides.async_scheduling = Some(value.parse().unwrap()),
        "scheduler.priority_aging_ms" => overrides.priority_aging_ms = Some(value.parse().unwrap()),
        "server.api_key_env" => overrides.api_key_env = text(),
        "server.max_body_bytes" => overrides.max_body_bytes = text(),
        "server.host" => overrides.host = text(),
        "server.port" => overrides.port = Some(value.parse().unwrap()),
        other => panic!("no override for {other}"),
    }
}

#[test]
fn each_key_is_taken_from_the_highest_layer_that_has_it() {
    let place = Place::new();
    for name in ["a", "b", "c"] {
        std::fs::write(place.path().join(format!("{name}.gguf")), "GGUF").unwrap();
    }
    for key in KEYS.iter().filter(|key| key.flag.is_some()) {
        let (_, values) = CASES.iter().find(|(name, _)| *name == key.name).expect(key.name);
        let (table, name) = key.parts();
        for layers in 0..3 {
            let in_file = if key.in_file { name } else { "listen" };
            let header = if table == "node" { "[[node]]".to_owned() } else { format!("[{table}]") };
            let mut text = format!("{header}\n{in_file} = {}\n", values[0]);
            if key.name != "model.path" {
                let line = "path = \"tiny.gguf\"\n";
                text = if table == "model" { text + line } else { format!("{text}[model]\n{line}") };
            }
            let plain = |value: &str| value.replace('"', "");
            let variable = key.variable();
            let mut variables = vec![("A", "key"), ("B", "key"), ("C", "key")];
            let value = plain(values[1]);
            // A path outside the file starts at the current directory, and is looked for beside the file then.
            if layers > 0 {
                variables.push((&variable, &value));
            }
            let mut overrides = Overrides::default();
            if layers > 1 {
                set(&mut overrides, key.name, plain(values[2]).trim_matches(['[', ']']));
            }
            let topology =
                place.layered(&text, &variables, &overrides).unwrap_or_else(|error| panic!("{error}"));
            let written = topology.to_annotated_toml(&computed()).parse::<toml::Table>().unwrap();
            let table = match &written[table] {
                toml::Value::Array(nodes) => nodes[0].clone(),
                table => table.clone(),
            };
            let found = table[in_file].to_string();
            let value = plain(values[layers]);
            let expected = match (key.name, layers) {
                ("model.path", _) => format!("\"{}\"", place.path().join(value).display()),
                ("server.host", 1 | 2) => format!("\"{value}:8000\""),
                ("server.port", 1 | 2) => format!("\"127.0.0.1:{value}\""),
                _ => values[layers].to_owned(),
            };
            assert_eq!(found, expected, "{} in {} layers", key.name, layers + 1);
            let origin = topology
                .origin(if layers == 0 && !key.in_file { "server.listen" } else { key.name })
                .unwrap();
            let named = [":2:", key.variable().as_str(), key.flag.unwrap()][layers].to_owned();
            assert!(origin.contains(&named), "{}: {origin}", key.name);
        }
    }
}

fn computed() -> Computed {
    Computed {
        dtype: "bfloat16",
        max_model_len: 1,
        cores: 1,
        threads_per_rank: 1,
        isa: Isa::Portable,
        num_blocks: 1,
        kv_cache_memory_bytes: 1,
    }
}

#[test]
fn variables_that_are_no_settings_of_ours_are_left_alone() {
    let place = Place::new();
    let variables = [
        ("CONSORT_API_KEY", "sk-secret"),
        ("CONSORT_HOME", "/srv"),
        ("CONSORT_SERVICE_HOST", "10.0.0.1"),
        ("CONSORT_SERVICE_PORT", "8000"),
        ("CONSORT_SERVICE_PORT_HTTP", "8000"),
        ("CONSORT_PORT", "tcp://10.0.0.1:8000"),
        ("CONSORT_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("CONSORT_PORT_8000_TCP_PROTO", "tcp"),
        ("CONSORT_PORT_8000_TCP_PORT", "8000"),
        ("CONSORT_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("CONSORT_SERVER_PORT", "tcp://10.0.0.1:8000"),
        ("CONSORT", "1"),
        ("CONSORTIUM__MODEL", "1"),
        ("CONSORT_MODEL__DTYPE", ""),
        ("CONSORT_PATH", "/opt/consort"),
        ("CONSORT_HOST", "host.example"),
        ("CONSORT_TYPE", "prod"),
        ("CONSORT_PATCH", "3"),
        ("CONSORT_WEIGHTS", "/srv/weights"),
        ("CONSORT_LISTENER", "main"),
        ("CONSORT_SERVER_PORT", "sctp://10.0.0.1:8000"),
        ("CONSORT_ENV_CONSORT_SERVER__LISTEN", "0.0.0.0:80"),
        ("CONSORT_MODEL", "a"),
    ];
    place.layered(super::MODEL, &variables, &Overrides::default()).unwrap();
    let odd = format!("{}[server]\napi_key_env = \"CONSORT_SERVER__API_KEY\"\n", super::MODEL);
    let key = [("CONSORT_SERVER__API_KEY", "sk-secret")];
    place.layered(&odd, &key, &Overrides::default()).expect("the topology names it");
}

#[test]
fn the_variable_of_the_key_may_be_named_by_any_layer() {
    let place = Place::new();
    let key = ("CONSORT_SERVER__API_KEY", "sk-secret");
    let named = ("CONSORT_SERVER__API_KEY_ENV", key.0);
    let flag = Overrides { api_key_env: Some(key.0.to_owned()), ..Overrides::default() };
    for (variables, overrides) in [(vec![key], flag.clone()), (vec![key, named], Overrides::default())] {
        let topology = place.layered(super::MODEL, &variables, &overrides).unwrap();
        assert_eq!(topology.api_keys()[0].reveal(), "sk-secret");
    }
    // A name that a higher layer has replaced is nobody's any more.
    let text = format!("{}[server]\napi_key_env = \"CONSORT_OLD__KEY\"\n", super::MODEL);
    assert!(place.layered(&text, &[key, ("CONSORT_OLD__KEY", "x")], &flag).is_err());
}

#[test]
fn a_variable_is_refused_only_if_it_can_be_nothing_but_a_setting() {
    let meant = |name: &str| Some(name.to_owned());
    let cases = [
        ("CONSORT_SERVER_LISTEN", Unknown::Setting(meant("CONSORT_SERVER__LISTEN"))),
        ("CONSORT_MODEL_DTYPE", Unknown::Setting(meant("CONSORT_MODEL__DTYPE"))),
        ("CONSORT_model__dtype", Unknown::Setting(meant("CONSORT_MODEL__DTYPE"))),
        ("CONSORT_SERVR__LISTEN", Unknown::Setting(meant("CONSORT_SERVER__LISTEN"))),
        ("CONSORT_NO__SUCH_THING", Unknown::Setting(None)),
        (
            "CONSORT_TENSOR_PARALLEL_SIZE",
            Unknown::Doubtful("CONSORT_PARALLEL__TENSOR_PARALLEL_SIZE".to_owned()),
        ),
        ("CONSORT_TP", Unknown::Doubtful("CONSORT_PARALLEL__TENSOR_PARALLEL_SIZE".to_owned())),
        ("CONSORT_MODEL", Unknown::Doubtful("CONSORT_MODEL__PATH".to_owned())),
        ("CONSORT_ISA", Unknown::Doubtful("CONSORT_PARALLEL__CPU_ISA".to_owned())),
        ("CONSORT_CPU_ISE", Unknown::Doubtful("CONSORT_CPU_ISA".to_owned())),
        ("CONSORT_PORT", Unknown::Doubtful("CONSORT_SERVER__PORT".to_owned())),
        ("CONSORT_API_KEY", Unknown::Foreign),
        ("CONSORT_HOME", Unknown::Foreign),
        ("CONSORT_CPU_ISA", Unknown::Foreign),
        ("CONSORT_ENV_CONSORT_SERVER__LISTEN", Unknown::Foreign),
    ];
    for (name, expected) in cases {
        assert_eq!(judge(name, "value"), expected, "{name}");
        assert_eq!(judge(name, "sctp://10.0.0.1:1"), Unknown::Foreign, "{name}");
    }
}

#[test]
fn an_engine_without_a_server_does_not_read_its_variables() {
    let place = Place::new();
    let variables = [("CONSORT_SERVER__PORT", "junk"), ("CONSORT_SERVER__API_KEY_ENV", "UNSET")];
    let alone = Overrides { without_server: true, ..Overrides::default() };
    place.layered(super::MODEL, &variables, &alone).unwrap();
    let misspelt = [("CONSORT_SERVER_LISTEN", "x"), ("CONSORT_SERVER__LISEN", "x")];
    place.layered(super::MODEL, &misspelt, &alone).unwrap();
    assert_eq!(
        place.layered(super::MODEL, &variables, &Overrides::default()).unwrap_err().violations().len(),
        2
    );
}

#[test]
fn a_topology_for_another_machine_keeps_its_server_and_looks_for_no_key() {
    let place = Place::new();
    let text = format!(
        "{}[server]\nlisten = \"0.0.0.0:80\"\napi_key_env = \"KEY\"\nmax_body_bytes = 7\n",
        super::MODEL
    );
    let variables = [
        ("CONSORT_SERVER__LISTEN", "127.0.0.1:1"),
        ("CONSORT_SERVER__API_KEY_ENV", "OTHER"),
        ("CONSORT_SERVER__MAX_BODY_BYTES", "junk"),
        ("CONSORT_SERVER__LISEN", "x"),
        ("CONSORT_SCHEDULER__MAX_NUM_SEQS", "3"),
    ];
    let elsewhere = Overrides { server_as_written: true, ..Overrides::default() };
    let topology = place.layered(&text, &variables, &elsewhere).unwrap();
    assert_eq!(topology.listen().to_string(), "0.0.0.0:80");
    assert_eq!((topology.api_key_env(), topology.max_body_bytes()), (Some("KEY"), 7));
    assert_eq!((topology.api_keys().len(), topology.max_num_seqs()), (0, 3));
    assert!(place.layered(&text, &[], &Overrides::default()).is_err(), "a server needs its key");
}

#[test]
fn any_environment_is_taken_or_refused() {
    let place = Place::new();
    let names =
        ["CONSORT_", "__", "_", "MODEL", "model", "DTYPE", "[0]", ".", "é", "=", "SERVER", "PORT", " "];
    let mut state = 7_u64;
    for _ in 0..2000 {
        let mut word = |count: usize| -> String {
            (0..count)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    names[(state >> 33) as usize % names.len()]
                })
                .collect()
        };
        let variables =
            [(format!("CONSORT_{}", word(5)), word(3)), (format!("CONSORT_{}", word(3)), word(1))];
        let environment: Environment = variables.into_iter().collect();
        let outcome =
            super::Topology::load_with(&place.write(super::MODEL), &Overrides::default(), &environment);
        if let Err(error) = outcome {
            assert!(!error.violations().is_empty(), "{error}");
        }
    }
}

#[test]
fn an_instruction_set_that_the_machine_lacks_is_refused_with_what_it_has() {
    let has = [Isa::Portable, Isa::Avx2];
    assert_eq!(words::chosen("auto", &has), Ok(None));
    assert_eq!(words::chosen(" AVX2", &has), Ok(Some(Isa::Avx2)));
    let (problem, remedy) = words::chosen("amx", &has).unwrap_err();
    assert_eq!(problem, "this machine has no amx");
    assert_eq!(remedy, "use \"auto\", or what it has: portable, avx2");
    let (_, remedy) = words::chosen("avx512f", &has).unwrap_err();
    assert_eq!(remedy, "did you mean \"avx512\"?");
}

#[test]
fn the_short_name_of_the_instruction_set_is_a_variable_like_the_long_one() {
    let place = Place::new();
    let isa = |variables: &[(&str, &str)], overrides: &Overrides| {
        place.layered(super::MODEL, variables, overrides).unwrap().cpu_isa()
    };
    let (short, long) = (("CONSORT_CPU_ISA", "portable"), ("CONSORT_PARALLEL__CPU_ISA", "portable"));
    let none = Overrides::default();
    assert_eq!(isa(&[], &none), None);
    assert_eq!(isa(&[short], &none), Some(Isa::Portable));
    assert_eq!(isa(&[long], &none), Some(Isa::Portable));
    assert_eq!(isa(&[short, long], &none), Some(Isa::Portable), "they agree");
    let auto = Overrides { cpu_isa: Some("auto".to_owned()), ..Overrides::default() };
    assert_eq!(isa(&[short], &auto), None, "the flag wins");
    let other = ("CONSORT_PARALLEL__CPU_ISA", "auto");
    assert!(place.layered(super::MODEL, &[short, other], &none).is_err(), "they differ");
    assert_eq!(isa(&[short, other], &auto), None, "where a flag decides, that does not matter");
    assert_eq!(isa(&[short, (long.0, " PORTABLE")], &none), Some(Isa::Portable), "the same, spelt otherwise");
}
