mod devices;
mod layers;
mod written;

use std::{fs, path::Path};

use super::{ApiKey, DType, DeviceSpec, Environment, Overrides, Topology, TopologyError};

/// A folder with a model file, and the topologies of a test.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tiny.gguf"), "GGUF").unwrap();
        Place(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, text: &str) -> std::path::PathBuf {
        let path = self.path().join("three.toml");
        fs::write(&path, text).unwrap();
        path
    }

    fn load(&self, text: &str) -> Result<Topology, TopologyError> {
        Topology::load_with(&self.write(text), &Overrides::default(), &Environment::empty())
    }

    /// The file under these environment variables and overrides.
    fn layered(
        &self,
        text: &str,
        variables: &[(&str, &str)],
        overrides: &Overrides,
    ) -> Result<Topology, TopologyError> {
        Topology::load_with(&self.write(text), overrides, &variables.iter().copied().collect())
    }

    fn refused(&self, text: &str) -> Vec<String> {
        lines(&self.load(text).unwrap_err(), self)
    }
}

/// Violations without excerpts, and without the folder's name.
fn lines(error: &TopologyError, place: &Place) -> Vec<String> {
    let folder = format!("{}/", place.path().display());
    let line = |violation: &super::Violation| {
        let whole = violation.to_string().replace(&folder, "");
        whole.lines().next().unwrap().to_owned()
    };
    error.violations().iter().map(line).collect()
}

const MODEL: &str = "[model]\npath = \"tiny.gguf\"\n";

#[test]
fn a_model_alone_gets_the_documented_defaults() {
    let place = Place::new();
    let topology = place.load(MODEL).unwrap();
    assert_eq!(topology.model_path(), place.path().join("tiny.gguf"));
    assert_eq!(topology.served_model_name(), "tiny");
    assert_eq!(topology.dtype(), DType::BFloat16);
    assert_eq!((topology.tensor_parallel_size(), topology.devices()), (1, &[DeviceSpec::Cpu(None)][..]));
    assert_eq!((topology.max_num_seqs(), topology.max_num_batched_tokens()), (256, 512));
    assert_eq!((topology.max_waiting_requests(), topology.block_size()), (1024, 16));
    assert_eq!((topology.max_model_len(), topology.kv_cache_memory_bytes()), (None, None));
    assert_eq!((topology.weights(), topology.threads_per_rank()), (None, None));
    assert_eq!(topology.listen().to_string(), "127.0.0.1:8000");
    assert_eq!(topology.max_body_bytes(), 16 << 20);
    assert!(topology.api_keys().is_empty());
    assert!(topology.enable_prefix_caching() && topology.salt_per_api_key());
    assert_eq!(topology.priority_aging_ms(), 10_000);
    assert!(topology.async_scheduling());
}

#[test]
fn every_key_is_read() {
    let place = Place::new();
    let text = r#"
        [model]
        path = "tiny.gguf"
        dtype = "float32"
        max_model_len = 2048
        served_model_name = "org/name"
        [parallel]
        tensor_parallel_size = 3
        data_parallel_size = 1
        weights = [2, 1.5, 1]
        threads_per_rank = 2
        [[node]]
        host = "localhost:7070"
        devices = ["cpu", "cpu:1"]
        [[node]]
        devices = ["cpu:2"]
        [cache]
        block_size = 32
        kv_cache_memory_bytes = "512MiB"
        kv_offloading_bytes = "2GiB"
        gpu_memory_utilization = 0.5
        enable_prefix_caching = false
        salt_per_api_key = false
        [scheduler]
        max_num_seqs = 8
        max_num_batched_tokens = 64
        max_waiting_requests = 4
        priority_aging_ms = 0
        async_scheduling = false
        [server]
        listen = "[::1]:0"
        api_key_env = "KEY"
        max_body_bytes = 1000
    "#;
    let topology = place.layered(text, &[("KEY", "secret")], &Overrides::default()).unwrap();
    assert_eq!(topology.dtype(), DType::Float32);
    assert_eq!(topology.max_model_len(), Some(2048));
    assert_eq!(topology.served_model_name(), "org/name");
    let cpu = |index| DeviceSpec::Cpu(index);
    assert_eq!(topology.devices(), [cpu(None), cpu(Some(1)), cpu(Some(2))]);
    assert_eq!(topology.weights(), Some(&[2.0, 1.5, 1.0][..]));
    assert_eq!(topology.threads_per_rank(), Some(2));
    assert_eq!((topology.block_size(), topology.kv_cache_memory_bytes()), (32, Some(512 << 20)));
    assert_eq!(topology.kv_offloading_bytes(), Some(2 << 30));
    assert_eq!(topology.gpu_memory_utilization(), 0.5);
    assert_eq!((topology.max_num_seqs(), topology.max_num_batched_tokens()), (8, 64));
    assert_eq!((topology.listen().host(), topology.listen().port()), ("::1", 0));
    assert!(!topology.enable_prefix_caching() && !topology.salt_per_api_key());
    assert_eq!(topology.priority_aging_ms(), 0);
    assert!(!topology.async_scheduling());
    assert_eq!(topology.api_keys().iter().map(ApiKey::reveal).collect::<Vec<_>>(), ["secret"]);
    assert!(!format!("{topology:?}").contains("secret"));
    assert_eq!(topology.max_body_bytes(), 1000);
}

#[test]
fn command_line_beats_environment_beats_file() {
    let place = Place::new();
    let text = format!("{MODEL}dtype = \"float32\"\nmax_model_len = 100\n[scheduler]\nmax_num_seqs = 1\n");
    let variables = [
        ("CONSORT_MODEL__MAX_MODEL_LEN", "200"),
        ("CONSORT_SCHEDULER__MAX_NUM_SEQS", "2"),
        ("CONSORT_SERVER__LISTEN", "0.0.0.0:9000"),
        ("CONSORT_PARALLEL__WEIGHTS", "[1, 2]"),
        ("CONSORT_CACHE__KV_CACHE_MEMORY_BYTES", "1.5GiB"),
        ("CONSORT_MODEL__DTYPE", ""),
        ("CONSORT_API_KEY", "not a setting"),
        ("OTHER__KEY", "nor this"),
    ];
    let overrides = Overrides {
        max_num_seqs: Some(3),
        tensor_parallel_size: Some(2),
        port: Some(9001),
        ..Overrides::default()
    };
    let topology = place.layered(&text, &variables, &overrides).unwrap();
    assert_eq!(topology.dtype(), DType::Float32, "from the file; an empty variable is unset");
    assert_eq!(topology.max_model_len(), Some(200), "from the environment");
    assert_eq!(topology.max_num_seqs(), 3, "from the command line");
    assert_eq!(topology.listen().to_string(), "0.0.0.0:9001", "host and port from two layers");
    assert_eq!((topology.tensor_parallel_size(), topology.weights()), (2, Some(&[1.0, 2.0][..])));
    assert_eq!(topology.kv_cache_memory_bytes(), Some(3 << 29));
}

#[test]
fn all_violations_come_together_each_with_its_place() {
    let place = Place::new();
    let text = r#"[model]
path = "tiny.gguf"
dtype = "fp8"
max_model_len = -1
[parallel]
tensor_parallel_size = 2
data_parallel_size = -2
weights = [1, 0, 1]
[[node]]
devices = ["cuda:0", "cpu", "tpu"]
host = "gpu-box:7070"
[cache]
block_size = 24
kv_cache_memory_bytes = "lots"
gpu_memory_utilization = 1.5
[scheduler]
max_num_seqs = 100
max_num_batched_tokens = 50
[server]
listen = "8000"
api_key_env = "UNSET"
max_body_bytes = 0
"#;
    let found = place.refused(text);
    let expected = [
        "three.toml:3:9: model.dtype: \"fp8\" is not computed in by this version",
        "three.toml:4:17: model.max_model_len: -1 is out of range",
        "three.toml:6:24: parallel.tensor_parallel_size: 2 ranks, but [[node]] lists 3 devices",
        "three.toml:7:22: parallel.data_parallel_size: -2 is out of range",
        "three.toml:8:15: parallel.weights: 0.0 is no share of a model",
        "three.toml:10:22: node[0].devices: \"cpu\" beside \"cuda:0\": ranks of one replica",
        "three.toml:10:29: node[0].devices: \"tpu\" is no device",
        "three.toml:11:8: node[0].host: \"gpu-box:7070\" is another machine",
        "three.toml:13:14: cache.block_size: 24 is not a multiple of 16",
        "three.toml:14:25: cache.kv_cache_memory_bytes: \"lots\" is no amount",
        "three.toml:15:26: cache.gpu_memory_utilization: 1.5",
        "three.toml:18:26: scheduler.max_num_batched_tokens: 50 tokens a step cannot carry max_num_seqs",
        "three.toml:20:10: server.listen: \"8000\" is no address",
        "three.toml:21:15: server.api_key_env: the environment variable UNSET is unset",
        "three.toml:22:18: server.max_body_bytes: it is 0",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}\nis not\n{expected}");
        assert!(found.contains("; "), "says what to do: {found}");
    }
}

#[test]
fn unknown_keys_and_wrong_types_are_all_found_beside_broken_rules() {
    let place = Place::new();
    let text = r#"modle = 1
[model]
path = "tiny.gguf"
max_model_len = "long"
[parallel]
tensor_paralel_size = 3
weights = [1, "two"]
threads_per_rank = 0
[[node]]
devices = ["cpu", 3]
gpus = 2
[cache]
kv_cache_memory_bytes = true
[server]
host = "0.0.0.0"
"#;
    let found = place.refused(text);
    let expected = [
        "three.toml:1:1: modle: unknown key `modle` outside of the tables; did you mean [model]?",
        "three.toml:4:17: model.max_model_len: the text \"long\" where a whole number is expected",
        "three.toml:6:1: parallel.tensor_paralel_size: unknown key `tensor_paralel_size`; did you mean",
        "three.toml:7:15: parallel.weights: the text \"two\" where a number is expected",
        "three.toml:8:20: parallel.threads_per_rank: 0 is out of range",
        "three.toml:10:19: node[0].devices: the whole number 3 where text is expected",
        "three.toml:11:1: node[0].gpus: unknown key `gpus`; the keys of [[node]] are host, devices",
        "three.toml:13:25: cache.kv_cache_memory_bytes: true where an amount of memory is expected",
        "three.toml:15:1: server.host: unknown key `host`; write listen = \"HOST:PORT\"",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}\nis not\n{expected}");
    }
}

#[test]
fn sections_of_the_wrong_shape_are_refused_by_name() {
    let place = Place::new();
    let found = place.refused("server = 3\nnode = { devices = [\"cpu\"] }\n[model]\npath = \"tiny.gguf\"\n");
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found.iter().any(|line| line.contains("server: the whole number 3 where a table is expected")),
        "{found:#?}"
    );
    assert!(
        found
            .iter()
            .any(|line| line.contains("node: [node] is one table where a list is expected; write [[node]]")),
        "{found:#?}"
    );
}

#[test]
fn broken_toml_is_shown_with_a_caret() {
    let place = Place::new();
    let text = place.load("[model]\npath = \"tiny.gguf\ndtype = 1\n").unwrap_err().to_string();
    assert!(text.contains("three.toml:2:"), "{text}");
    assert!(text.contains("  2 | path = \"tiny.gguf\n") && text.contains('^'), "{text}");
}

#[test]
fn an_excerpt_marks_the_value() {
    let place = Place::new();
    let text = place.load("[model]\n\tpath = \"tiny.gguf\"\n\tdtype = \"fp8\"\n").unwrap_err().to_string();
    assert!(text.contains("  3 | \tdtype = \"fp8\"\n    | \t        ^^^^^"), "{text}");
    assert!(text.starts_with("the configuration has 1 problem:\n"), "{text}");
}

#[test]
fn values_outside_the_file_are_named_by_variable_or_flag() {
    let place = Place::new();
    let variables = [
        ("CONSORT_SCHEDULER__MAX_NUM_SEQS", "many"),
        ("CONSORT_SERVER__LISEN", "x"),
        ("CONSORT_CACHE__BLOCK_SIZE", "17"),
        ("CONSORT_PARALLEL__WEIGHTS", "a,b"),
    ];
    let overrides =
        Overrides { dtype: Some("int4".to_owned()), host: Some("a b".to_owned()), ..Overrides::default() };
    let found = lines(&place.layered(MODEL, &variables, &overrides).unwrap_err(), &place);
    let expected = [
        "environment variable CONSORT_SERVER__LISEN: server.lisen: no setting has this name; did you mean",
        "environment variable CONSORT_PARALLEL__WEIGHTS: parallel.weights: `a,b` where a list of numbers is",
        "environment variable CONSORT_SCHEDULER__MAX_NUM_SEQS: scheduler.max_num_seqs: `many` where a whole",
        "--dtype: model.dtype: \"int4\" is no dtype",
        "environment variable CONSORT_CACHE__BLOCK_SIZE: cache.block_size: 17 is not a multiple of 16",
        "--host: server.listen: \"a b\" is no host",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}\nis not\n{expected}");
    }
}

#[test]
fn ranks_and_devices_imply_each_other_and_must_agree() {
    let place = Place::new();
    let size = |text: &str| place.load(&format!("{MODEL}{text}")).unwrap().tensor_parallel_size();
    assert_eq!(size("[parallel]\ntensor_parallel_size = 5\n"), 5);
    assert_eq!(size("[[node]]\ndevices = [\"cpu\", \"cpu\", \"cpu\"]\n"), 3);
    assert_eq!(size("[parallel]\ntensor_parallel_size = 2\n[[node]]\ndevices = [\"cpu\", \"cpu\"]\n"), 2);
    let same = place
        .refused(&format!("{MODEL}[parallel]\ntensor_parallel_size = 2\n[[node]]\ndevices = [\"cpu\"]\n"));
    assert!(
        same[0].contains("parallel.tensor_parallel_size: 2 ranks, but [[node]] lists 1 device"),
        "{same:?}"
    );
    let huge = place.refused(&format!("{MODEL}[parallel]\ntensor_parallel_size = 4000000000\n"));
    assert!(huge[0].contains("give a whole number from 1 to 1024"), "{huge:?}");
}

#[test]
fn where_ranks_and_devices_are_of_different_layers_the_higher_decides() {
    let place = Place::new();
    let devices = |text: &str, variables: &[(&str, &str)], overrides: &Overrides| {
        let topology = place.layered(&format!("{MODEL}{text}"), variables, overrides).unwrap();
        topology.devices().iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    };
    let listed = "[[node]]\ndevices = [\"cpu:0\", \"cpu:1\"]\n";
    let counted = "[parallel]\ntensor_parallel_size = 3\n";
    let ranks = |ranks| Overrides { tensor_parallel_size: Some(ranks), ..Overrides::default() };
    let on = |list: &str| Overrides { devices: Some(list.to_owned()), ..Overrides::default() };
    let none = Overrides::default();
    let variable = [("CONSORT_PARALLEL__TENSOR_PARALLEL_SIZE", "4")];
    assert_eq!(devices(listed, &[], &ranks(3)), "cpu,cpu,cpu");
    assert_eq!(devices(listed, &[], &ranks(2)), "cpu:0,cpu:1", "they agree");
    assert_eq!(devices(listed, &variable, &none), "cpu,cpu,cpu,cpu");
    assert_eq!(devices(counted, &[], &on("cpu:7,cpu:8")), "cpu:7,cpu:8");
    assert_eq!(devices("", &variable, &on("cpu:7")), "cpu:7");
}

#[test]
fn this_machine_has_several_names() {
    let place = Place::new();
    let load = |host: &str| place.load(&format!("{MODEL}[[node]]\nhost = \"{host}\"\ndevices = [\"cpu\"]\n"));
    for here in ["localhost", "localhost:7070", "127.0.0.1", "127.0.0.1:1", "::1", "[::1]", "[::1]:7070"] {
        assert!(load(here).is_ok(), "{here}");
    }
    for elsewhere in ["::2", "[::2]:1", "10.0.0.1", "localhost.example", ""] {
        assert!(load(elsewhere).is_err(), "{elsewhere}");
    }
}

#[test]
fn hosts_are_names_and_addresses_with_the_number_of_their_interface() {
    let place = Place::new();
    let listen = |host: &str| {
        let overrides = Overrides { host: Some(host.to_owned()), ..Overrides::default() };
        Some(place.layered(MODEL, &[], &overrides).ok()?.listen().to_string())
    };
    for (host, address) in [
        ("::1", "[::1]:8000"),
        ("[::1]", "[::1]:8000"),
        ("fe80::1%2", "[fe80::1%2]:8000"),
        ("a-b", "a-b:8000"),
    ] {
        assert_eq!(listen(host).as_deref(), Some(address));
    }
    for wrong in ["[[::1", "[::1", "::1]", "fe80::1%", "fe80::1%eth0", "a%1", "[]", ""] {
        assert_eq!(listen(wrong), None, "{wrong}");
    }
}

#[cfg(unix)]
#[test]
fn what_is_not_unicode_is_refused_in_so_many_words() {
    use std::{ffi::OsString, os::unix::ffi::OsStringExt};

    let place = Place::new();
    let odd = OsString::from_vec(b"mod\xffel".to_vec());
    let model = place.path().join(&odd);
    fs::create_dir(&model).unwrap();
    let told = |error: TopologyError| error.to_string();
    let given = Topology::from_model_with(&model, &Overrides::default(), &Environment::empty()).unwrap_err();
    assert!(told(given).contains("is not Unicode; rename it"));
    let built = Topology::builder(&model).build_with(&Environment::empty()).unwrap_err();
    assert_eq!(built.violations()[0].place(), "TopologyBuilder::new");
    assert!(told(built).contains("is not Unicode; rename it"));

    let variables = ["CONSORT_MODEL__PATH", "CONSORT_CPU_ISA", "KEY", "OTHER"];
    let environment = || Environment::of(variables.map(|name| (name.into(), odd.clone())));
    let text = format!("{MODEL}[server]\napi_key_env = \"KEY\"\n");
    let load = |overrides: &Overrides| Topology::load_with(&place.write(&text), overrides, &environment());
    let found = lines(&load(&Overrides::default()).unwrap_err(), &place);
    assert_eq!(
        found,
        [
            "three.toml:4:15: server.api_key_env: the environment variable KEY is not Unicode; set it to the API \
             key, or remove api_key_env to serve without one",
            "environment variable CONSORT_CPU_ISA: parallel.cpu_isa: its value is not Unicode; set it to text in \
             UTF-8, or unset it",
            "environment variable CONSORT_MODEL__PATH: model.path: its value is not Unicode; set it to text in \
             UTF-8, or unset it",
        ]
    );
    let flags = Overrides {
        model: Some(place.path().join("tiny.gguf").display().to_string()),
        cpu_isa: Some("auto".to_owned()),
        without_server: true,
        ..Overrides::default()
    };
    load(&flags).expect("flags decide");
}

#[test]
fn weights_are_one_positive_number_for_each_rank() {
    let place = Place::new();
    let found =
        place.refused(&format!("{MODEL}[parallel]\ntensor_parallel_size = 2\nweights = [1.0, -inf, nan]\n"));
    assert!(found[0].contains("3 weights for 2 ranks") && found[1].contains("-inf is no share"), "{found:?}");
}

#[test]
fn a_bound_that_is_given_pulls_the_others_default_along() {
    let place = Place::new();
    let bounds = |text: &str| {
        let topology = place.load(&format!("{MODEL}[scheduler]\n{text}\n")).unwrap();
        (topology.max_num_seqs(), topology.max_num_batched_tokens())
    };
    assert_eq!(bounds("max_num_seqs = 1000"), (1000, 1000));
    assert_eq!(bounds("max_num_batched_tokens = 64"), (64, 64));
    assert_eq!(bounds("max_num_batched_tokens = 2048"), (256, 2048));
}

#[test]
fn amounts_of_memory_take_units() {
    let place = Place::new();
    let bytes = |value: &str| {
        place
            .load(&format!("{MODEL}[cache]\nkv_cache_memory_bytes = {value}\n"))
            .ok()?
            .kv_cache_memory_bytes()
    };
    assert_eq!(bytes("1_000"), Some(1000));
    assert_eq!(bytes("\"64\""), Some(64));
    assert_eq!(bytes("\"1 KiB\""), Some(1024));
    assert_eq!(bytes("\"2GB\""), Some(2_000_000_000));
    assert_eq!(bytes("\"0.5MiB\""), Some(1 << 19));
    assert_eq!(bytes("\"9223372036854775807B\""), Some(i64::MAX as u64), "what TOML can write");
    for bad in [
        "-1",
        "0",
        "\"\"",
        "\"MiB\"",
        "\"-1GiB\"",
        "\"1e3\"",
        "\"inf\"",
        "\"1.2.3KB\"",
        "\"99999999999TiB\"",
        "\"9223372036854775808B\"",
        "1.5",
    ] {
        assert_eq!(bytes(bad), None, "{bad}");
    }
}

#[test]
fn a_models_path_is_looked_for_beside_the_file_then_in_the_current_directory() {
    let place = Place::new();
    let absolute = place.path().join("tiny.gguf").display().to_string();
    let topology = place.load(&format!("[model]\npath = \"{absolute}\"\n")).unwrap();
    assert_eq!(topology.model_path(), Path::new(&absolute));
    let here = place.load("[model]\npath = \"src/lib.rs\"\n").unwrap();
    assert_eq!(here.model_path(), Path::new("src/lib.rs"), "tests run in the package's folder");
    let found = place.refused("[model]\npath = \"gone.gguf\"\n");
    assert!(found[0].contains("nothing is at gone.gguf and gone.gguf"), "folder names are cut: {found:?}");
}

#[test]
fn models_that_are_not_local_are_refused_with_the_way_to_get_them() {
    let place = Place::new();
    let found = place.refused("[model]\npath = \"HuggingFaceTB/SmolLM2-135M-Instruct\"\n");
    assert!(
        found[0].contains("is not a local folder or GGUF file; download it first (`hf download"),
        "{found:?}"
    );
    fs::write(place.path().join("model.safetensors"), "").unwrap();
    let found = place.refused("[model]\npath = \"model.safetensors\"\n");
    assert!(found[0].contains("give the folder that holds it"), "{found:?}");
    assert!(place.refused("")[0].starts_with("three.toml: model.path: no model is named"));
    assert!(place.refused("[model]\npath = \" \"\n")[0].contains("it is empty"));
}

#[test]
fn a_model_argument_alone_makes_a_topology() {
    let place = Place::new();
    let model = place.path().join("tiny.gguf");
    let variables = [("CONSORT_MODEL__PATH", "elsewhere"), ("CONSORT_MODEL__DTYPE", "float32")];
    let overrides = Overrides { tensor_parallel_size: Some(3), ..Overrides::default() };
    let topology = Topology::from_model_with(&model, &overrides, &variables.into_iter().collect()).unwrap();
    assert_eq!((topology.model_path(), topology.tensor_parallel_size()), (model.as_path(), 3));
    assert_eq!(topology.dtype(), DType::Float32);
    let folder = Topology::from_model_with(place.path(), &overrides, &Environment::empty()).unwrap();
    assert_eq!(folder.served_model_name(), place.path().file_name().unwrap().to_str().unwrap());
    let error =
        Topology::from_model_with(Path::new("org/name"), &overrides, &Environment::empty()).unwrap_err();
    assert!(
        error.to_string().contains("the model argument: model.path: \"org/name\" is not a local"),
        "{error}"
    );
}

#[test]
fn a_topology_made_in_code_obeys_the_same_rules() {
    let place = Place::new();
    let model = place.path().join("tiny.gguf");
    let topology = Topology::builder(&model)
        .dtype(DType::Float32)
        .devices(["cpu", "cpu:1"])
        .weights([1.0, 3.0])
        .kv_cache_memory_bytes(1 << 40)
        .max_model_len(77)
        .listen("localhost:0")
        .build_with(&Environment::empty())
        .unwrap();
    assert_eq!((topology.tensor_parallel_size(), topology.max_model_len()), (2, Some(77)));
    assert_eq!(topology.kv_cache_memory_bytes(), Some(1 << 40));
    assert_eq!(topology.listen().to_string(), "localhost:0");
    let error = Topology::builder(&model)
        .tensor_parallel_size(0)
        .max_num_seqs(usize::MAX)
        .api_key_env("NO_SUCH")
        .build_with(&Environment::empty())
        .unwrap_err();
    let places: Vec<&str> = error.violations().iter().map(super::Violation::place).collect();
    let setter = |name: &str| format!("TopologyBuilder::{name}");
    assert_eq!(places, [setter("tensor_parallel_size"), setter("max_num_seqs"), setter("api_key_env")]);
}

#[test]
fn text_without_a_file_is_read_too() {
    let place = Place::new();
    let model = place.path().join("tiny.gguf");
    let text = format!("[model]\npath = \"{}\"\ndtype = 1\n", model.display());
    let error =
        Topology::from_toml_str_with(&text, &Overrides::default(), &Environment::empty()).unwrap_err();
    assert!(
        error.to_string().contains("topology:3:9: model.dtype: the whole number 1 where text"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_a_topology_is_not_read_whole() {
    let place = Place::new();
    let big = place.path().join("big.toml");
    fs::File::create(&big).unwrap().set_len(1 << 40).unwrap();
    let load = |path: &Path| Topology::load_with(path, &Overrides::default(), &Environment::empty());
    assert!(matches!(load(&big), Err(TopologyError::TooLarge { .. })));
    assert!(matches!(load(&place.path().join("absent.toml")), Err(TopologyError::Read { .. })));
    fs::write(place.path().join("binary.toml"), [0xFF, 0xFE]).unwrap();
    assert!(matches!(load(&place.path().join("binary.toml")), Err(TopologyError::NotText { .. })));
}

#[test]
fn any_text_is_parsed_or_refused() {
    let place = Place::new();
    let pieces = [
        "[model]",
        "[[node]]",
        "path=1",
        "devices=[",
        "]",
        "\"",
        "\n",
        "=",
        "é",
        "{",
        "}",
        ".",
        "node=",
        "\u{0}",
    ];
    let mut state = 1u64;
    for _ in 0..3000 {
        let mut text = String::new();
        for _ in 0..8 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            text.push_str(pieces[(state >> 33) as usize % pieces.len()]);
        }
        let result = Topology::from_toml_str_with(&text, &Overrides::default(), &Environment::empty());
        let error = result.expect_err(&text);
        assert!(!error.violations().is_empty() && !error.to_string().is_empty());
    }
    drop(place);
}

#[test]
fn a_megabyte_of_mistakes_is_answered_in_bounded_time_and_space() {
    let piece = |text: &str| text.repeat((1 << 20) / text.len());
    let numbered = |line: fn(usize) -> String| (0..60_000).map(line).collect::<String>();
    let texts = [
        numbered(|at| format!("unknown_key_{at} = 1\n")),
        format!("[model]\n{}", numbered(|at| format!("max_model_ln{at} = 1\n"))),
        numbered(|_| "[[node]]\n".to_owned()),
        piece("[model]\n"),
        piece("dtype = 1\n"),
        piece("= ]\n"),
        piece("\u{1}"),
        piece("a.b.c"),
        format!("a = \"{}\"", piece("x")),
        format!("{} = 1", piece("k")),
        // All on one line, whose places take time to tell.
        format!("[parallel]\nweights = [{}]\n", "\"a\",".repeat(200_000)),
        format!("[[node]]\ndevices = [{}]\n", "\"x\",".repeat(200_000)),
        format!("[[node]]\ndevices = [{}]\n", "1,".repeat(300_000)),
        format!("node = [{}]\n", "1,".repeat(300_000)),
        format!("node = [{}]\n", "{},".repeat(300_000)),
        format!("model = {{ {} }}\n", numbered(|at| format!("k{at} = 1, "))),
        format!("[parallel]\nweights = [{}]\n", "-1,".repeat(300_000)),
        format!("server = {{ {} }}\n", numbered(|at| format!("password{at}=1,"))),
    ];
    for text in texts {
        let begin = std::time::Instant::now();
        let outcome = Topology::from_toml_str_with(&text, &Overrides::default(), &Environment::empty());
        let message = outcome.expect_err("none of these is a topology").to_string();
        let start: String = text.chars().take(20).collect();
        println!("{start:?}: {:?}", begin.elapsed());
        assert!(begin.elapsed().as_secs() < 20, "{start}: {:?}", begin.elapsed());
        assert!(message.len() < 64 << 10, "{start}: {} bytes of message", message.len());
    }
}

#[test]
fn mistakes_are_told_once_each() {
    let place = Place::new();
    let found =
        place.refused("[model]\npath = \"tiny.gguf\"\n[parallel]\nweights = [-1]\nthreads_per_rank = 0\n");
    assert_eq!(found.len(), 2, "{found:#?}");
}
