//! What is written reads back as the same.

use consort_kernels::device::Isa;
use proptest::prelude::*;

use super::{super::Computed, Environment, Overrides, Place, Topology};
use crate::topology::DType;

#[test]
fn written_topologies_read_back_equal() {
    let place = Place::new();
    let topology = Topology::builder(place.path().join("tiny.gguf"))
        .served_model_name("a \"quoted\" name\\")
        .devices(["cpu:3", "cpu"])
        .weights([1.0, 0.1])
        .threads_per_rank(2)
        .max_model_len(512)
        .kv_cache_memory_bytes(1 << 30)
        .enable_prefix_caching(false)
        .salt_per_api_key(false)
        .priority_aging_ms(0)
        .async_scheduling(false)
        .kv_offloading_bytes(1 << 31)
        .listen("[::]:80")
        .api_key_env("KEY")
        .build_with(&[("KEY", "secret")].into_iter().collect())
        .unwrap();
    let text = topology.to_toml();
    assert!(!text.contains("secret"));
    let again = place.layered(&text, &[("KEY", "secret")], &Overrides::default()).unwrap();
    assert_eq!(again, topology, "{text}");
}

fn computed() -> Computed {
    Computed {
        dtype: "bfloat16",
        max_model_len: 8192,
        cores: 4,
        threads_per_rank: 2,
        isa: Isa::Portable,
        num_blocks: 10,
        kv_cache_memory_bytes: 12_345,
    }
}

#[test]
fn every_value_is_written_with_its_origin() {
    let place = Place::new();
    let text = "[model]\npath = \"tiny.gguf\"\ndtype = \"auto\"\n[server]\nlisten = \"0.0.0.0:1\"\n\
                api_key_env = \"KEY\"\n";
    let variables =
        [("CONSORT_SCHEDULER__MAX_NUM_SEQS", "8"), ("CONSORT_CPU_ISA", "portable"), ("KEY", "sk-secret")];
    let overrides = Overrides {
        tensor_parallel_size: Some(2),
        port: Some(9000),
        weights: Some("2,1".to_owned()),
        ..Overrides::default()
    };
    let written = place.layered(text, &variables, &overrides).unwrap().to_annotated_toml(&computed());
    let folder = format!("{}/", place.path().display());
    let lines: Vec<String> = written
        .replace(&folder, "")
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        "path = \"tiny.gguf\" # three.toml:2:8",
        "dtype = \"auto\" # three.toml:3:9; here bfloat16",
        "max_model_len = 8192 # computed: the model's own limit",
        "served_model_name = \"tiny\" # computed: from the path",
        "tensor_parallel_size = 2 # --tensor-parallel-size",
        "weights = [2.0, 1.0] # --weights",
        "threads_per_rank = 2 # computed: 4 cores shared out over 2 ranks",
        "cpu_isa = \"portable\" # environment variable CONSORT_CPU_ISA",
        "batch_invariant = true # computed: CPUs always are",
        "isolation = \"thread\" # default",
        "all_reduce = \"auto\" # default; no effect on CPUs",
        "# [[node]]",
        "# devices = [\"cpu\", \"cpu\"] # computed: one for each rank",
        "block_size = 16 # default",
        "kv_cache_memory_bytes = 12345 # computed: 10 blocks, over all ranks",
        "enable_prefix_caching = true # default",
        "salt_per_api_key = true # default; no effect with fewer than two keys",
        "# kv_offloading_bytes is not set: evicted blocks are not kept",
        "max_num_seqs = 8 # environment variable CONSORT_SCHEDULER__MAX_NUM_SEQS",
        "max_num_batched_tokens = 512 # default",
        "priority_aging_ms = 10000 # default",
        "async_scheduling = true # default",
        "listen = \"0.0.0.0:9000\" # three.toml:5:10, port from --port",
        "api_key_env = \"KEY\" # three.toml:6:15",
    ];
    for line in expected {
        assert!(lines.iter().any(|written| written == line), "{line}\nis not in\n{written}");
    }
    assert!(!written.contains("sk-secret"), "{written}");
}

#[test]
fn nothing_that_terminals_obey_is_written_as_it_is() {
    let place = Place::new();
    let name = "a\u{9b}31m\u{1b}\u{202e}\u{7f}\r\n\t\\'\"é";
    let topology = Topology::builder(place.path().join("tiny.gguf")).served_model_name(name);
    let topology = topology.build_with(&Environment::empty()).unwrap();
    let written = topology.to_annotated_toml(&computed());
    assert!(
        written.contains(r#"served_model_name = "a\u009B31m\u001B\u202E\u007F\u000D\n\t\\'\"é""#),
        "{written}"
    );
    let again = place.layered(&topology.to_toml(), &[], &Overrides::default()).unwrap();
    assert_eq!(again.served_model_name(), name);
}

#[test]
fn a_computed_list_of_devices_does_not_bind_whoever_edits_what_was_written() {
    let place = Place::new();
    let written = place.load("[model]\npath = \"tiny.gguf\"\n").unwrap().to_annotated_toml(&computed());
    let edited = written.replace("tensor_parallel_size = 1", "tensor_parallel_size = 3");
    assert_eq!(place.load(&edited).unwrap().tensor_parallel_size(), 3);
}

fn topology(place: &Place, seed: &Seed) -> Topology {
    let mut builder = Topology::builder(place.path().join("tiny.gguf"))
        .served_model_name(&seed.name)
        .dtype([DType::BFloat16, DType::Float32, DType::Auto][seed.choice % 3])
        .block_size([16, 32, 256][seed.choice % 3])
        .max_num_seqs(seed.seqs)
        .max_num_batched_tokens(seed.seqs + seed.more)
        .max_body_bytes(seed.bytes % (1 << 30) + 1)
        .listen(["127.0.0.1:0", "[::1]:65535", "a-host.example:80"][seed.choice % 3]);
    if seed.flags & 1 != 0 {
        builder = builder.weights(seed.weights.iter().copied()).tensor_parallel_size(seed.weights.len());
    }
    if seed.flags & 2 != 0 {
        builder = builder.devices(seed.weights.iter().map(|_| format!("cpu:{}", seed.choice)));
    }
    if seed.flags & 4 != 0 {
        builder = builder.max_model_len(seed.seqs).threads_per_rank(seed.more % 1024 + 1);
    }
    if seed.flags & 8 != 0 {
        builder = builder.kv_cache_memory_bytes(seed.bytes.max(1) % (i64::MAX as u64)).api_key_env("KEY");
    }
    if seed.flags & 16 != 0 {
        // Kernels go with anything.
        builder = builder.cpu_isa("portable").all_reduce(["auto", "kernels"][seed.choice % 2]);
    }
    if seed.flags & 32 != 0 {
        builder = builder.batch_invariant(seed.choice.is_multiple_of(2));
        builder = builder.isolation(["process", "thread"][seed.choice / 2 % 2]);
    }
    if seed.flags & 128 != 0 {
        let is_even = seed.choice.is_multiple_of(2);
        let aging_ms = seed.bytes % (24 * 3600 * 1000 + 1);
        builder =
            builder.enable_prefix_caching(is_even).salt_per_api_key(!is_even).priority_aging_ms(aging_ms);
        builder = builder.async_scheduling(is_even);
    }
    if seed.flags & 64 != 0 {
        let uuid =
            |rank: usize| format!("cuda:GPU-0123abcd-4567-89ef-0123-4567{:08x}", rank * seed.choice + rank);
        let card = |rank| if rank % 2 == 0 { uuid(rank) } else { format!("cuda:{rank}") };
        builder = builder.devices((0..seed.weights.len()).map(card));
    }
    builder.build_with(&key()).unwrap()
}

fn key() -> Environment {
    [("KEY", "sk-secret")].into_iter().collect()
}

#[derive(Debug)]
struct Seed {
    name: String,
    choice: usize,
    seqs: usize,
    more: usize,
    bytes: u64,
    weights: Vec<f64>,
    flags: u32,
}

prop_compose! {
    fn seeds()(
        name in "[^\\x00]{0,20}x",
        choice in 0_usize..1000,
        seqs in 1_usize..60_000,
        more in 0_usize..100_000,
        bytes in any::<u64>(),
        weights in prop::collection::vec(1e-30_f64..1e30, 1..9),
        flags in 0_u32..256,
    ) -> Seed {
        Seed { name, choice, seqs, more, bytes, weights, flags }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_topology_reads_back_from_what_was_written(seed in seeds()) {
        let place = Place::new();
        let topology = topology(&place, &seed);
        let again = |text: &str| Topology::from_toml_str_with(text, &Overrides::default(), &key());
        let plain = topology.to_toml();
        prop_assert_eq!(again(&plain).unwrap(), topology.clone(), "{}", plain);

        let annotated = topology.to_annotated_toml(&computed());
        prop_assert!(!annotated.contains("sk-secret"));
        let settled = again(&annotated).unwrap();
        let values = |text: &str| text.parse::<toml::Table>().unwrap();
        // A computed value is one that was given, the second time: the same value.
        prop_assert_eq!(values(&settled.to_annotated_toml(&computed())), values(&annotated));
    }
}
