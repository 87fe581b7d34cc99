use std::{fs, path::Path};

use clap::Parser;
use consort_parallel::plan::{Change, PlanRequest, WeightFormat};
use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::{
    cli::args::{Cli, Command},
    error::EngineError,
    testing,
    topology::{Environment, Overrides, Topology},
};

mod elsewhere;
mod partial;

const HEADLINE: [&str; 5] = ["gpt-oss-120b", "--gpus", "3xH100-80GB", "--dtype", "bfloat16"];

fn parse(words: &[&str]) -> Result<PlanArgs, clap::Error> {
    let line = [&["consort", "plan"], words].concat();
    let Command::Plan(args) = Cli::try_parse_from(line)?.command else { panic!("not plan") };
    Ok(args)
}

fn answered(words: &[&str]) -> Answer {
    answer(&parse(words).expect("well spelt"), Style::Plain).expect("an answer")
}

fn json(words: &[&str]) -> Value {
    serde_json::from_str(&answered(&[words, &["--json"]].concat()).text).expect("JSON")
}

fn code(error: &anyhow::Error) -> u8 {
    exit_code(error)
}

fn checkpoint() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    folder
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn three_h100_and_gpt_oss_are_told_of_with_bars_and_without_colours() {
    let answer = answered(&HEADLINE);
    assert!(answer.problem.is_none());
    for part in [
        "gpt-oss-120b: 116.83 billion parameters, 5.13 billion of them for a token (4 of 128 experts)",
        "weights in bfloat16, 233.7 GB in all",
        "keys and values: 72.0 KiB a token; where windows are freed, 36.0 KiB a token and 5.3 MB a sequence",
        "it fits",
        "note: this version plans gpt-oss-120b and does not run it",
    ] {
        assert!(answer.text.contains(part), "{part}\n{}", answer.text);
    }
    let bars: Vec<&str> = answer.text.lines().filter(|line| line.contains('|')).collect();
    assert_eq!(bars.len(), 3);
    for bar in bars {
        assert_eq!(bar.split('|').nth(1).map(str::len), Some(60), "{bar}");
        assert!(bar.contains('#') && bar.contains('+') && bar.contains('=') && bar.contains('.'), "{bar}");
    }
    assert!(!answer.text.contains('\u{1b}'));
    let coloured =
        super::answer(&parse(&HEADLINE).expect("well spelt"), Style::Coloured).expect("an answer").text;
    assert!(coloured.contains("\u{1b}[34m█") && coloured.lines().count() == answer.text.lines().count());
}

#[test]
fn colours_are_for_terminals_whose_users_did_not_refuse_them() {
    let style =
        |is_terminal, no_color: Option<&str>| Style::of_terminal(is_terminal, no_color.map(AsRef::as_ref));
    assert_eq!(style(true, None), Style::Coloured);
    assert_eq!(style(true, Some("")), Style::Coloured);
    assert_eq!(style(true, Some("1")), Style::Plain);
    assert_eq!(style(false, None), Style::Plain);
}

#[test]
fn json_names_every_number_that_documentation_lists() {
    let json = json(&HEADLINE);
    let documented = include_str!("../../../../docs/plan.md");
    fn names(value: &Value, into: &mut Vec<String>) {
        match value {
            Value::Object(object) => object.iter().for_each(|(name, value)| {
                into.push(name.clone());
                names(value, into);
            }),
            Value::Array(values) => values.iter().for_each(|value| names(value, into)),
            _ => {}
        }
    }
    let mut all = Vec::new();
    names(&json, &mut all);
    all.sort();
    all.dedup();
    assert!(all.len() > 50, "{all:?}");
    for name in all {
        assert!(documented.contains(&format!("`{name}`")), "docs/plan.md does not tell of `{name}`");
    }
    assert_eq!(json["fits"], true);
    assert_eq!(json["ranks"][2]["query_heads"], 16);
    assert_eq!(json["ranks"][0]["expert_columns"], 960);
    assert_eq!(json["ranks"][0]["vocabulary_rows"], 67_072);
    assert_eq!(json["cache"]["windows"], serde_json::json!([128, null]));
    let users = json["users"][0]["windows_freed"].as_u64().expect("a number");
    assert!((135..=185).contains(&users), "{users}");
    let parts: u64 =
        json["ranks"][0]["weights"].as_object().expect("parts").values().filter_map(Value::as_u64).sum();
    assert_eq!(json["ranks"][0]["weight_bytes"].as_u64(), Some(parts));
    assert_eq!(json["steps"].as_array().map(Vec::len), Some(4));
}

#[test]
fn what_does_not_fit_ends_with_code_one_and_the_smallest_change() {
    let answer = answered(&["openai/gpt-oss-120b", "--gpus", "2xH100-80GB", "--dtype", "bfloat16"]);
    let problem = answer.problem.expect("it does not fit");
    assert_eq!(code(&DoesNotFit(problem.clone()).into()), 1);
    assert!(problem.contains("the smallest change: dtype = mxfp4, as the checkpoint holds it"), "{problem}");
    assert!(answer.text.contains("or: 3 x H100-80GB\n"), "{}", answer.text);
}

#[test]
fn wrong_calls_end_with_code_two_and_say_what_could_be_meant() {
    for (words, said) in [
        (&["gpt-os-120b", "--gpus", "H100"][..], "did you mean gpt-oss-120b?"),
        (&["gpt-oss-120b"], "--gpus"),
        (&["Llama-3.1-8B", "--gpus", "H100", "--dtype", "mxfp4"], "format of experts"),
        (&["Llama-3.1-8B", "--gpus", "40xH100"], "at most 32 ranks"),
        (&["Llama-3.1-8B", "--gpus", "H100", "--max-model-len", "0"], "max_model_len is 0"),
        (&["gpt-oss-120b", "--gpus", "H100", "--emit-toml"], "--dtype bfloat16"),
    ] {
        let error = answer(&parse(words).expect("well spelt"), Style::Plain).err().expect("refused");
        assert_eq!(code(&error), 2, "{words:?}: {error}");
        assert!(error.to_string().contains(said), "{words:?}: {error}");
    }
    for (words, said) in [
        (&["gpt-oss-120b", "--gpus", "3xH1000"][..], "known are"),
        (&["gpt-oss-120b", "--gpus", "H100", "--dtype", "int4"], "mxfp4, fp8, bfloat16, float32"),
        (&["gpt-oss-120b", "--gpus", "H100", "--gpu-memory-utilization", "1.5"], "at most 1"),
        (&["gpt-oss-120b", "--gpus", "H100", "--json", "--emit-toml"], "cannot be used with"),
    ] {
        let error = parse(words).expect_err("refused");
        assert_eq!(error.exit_code(), 2, "{words:?}");
        assert!(error.to_string().contains(said), "{words:?}: {error}");
    }
}

#[test]
fn an_emitted_topology_is_one_that_serve_takes() {
    for words in [&HEADLINE[..], &["Llama-3.3-70B", "--gpus", "4xA100-80GB", "--max-num-seqs", "64"]] {
        let text = answered(&[words, &["--emit-toml"]].concat()).text;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("cluster.toml");
        fs::write(&file, &text).expect("written");
        let name =
            text.lines().find_map(|line| line.strip_prefix("path = ")).expect("a path").trim_matches('"');
        fs::create_dir_all(folder.path().join(name)).expect("a new folder");
        let taken = Topology::load_with(&file, &Overrides::default(), &Environment::empty());
        let topology = taken.unwrap_or_else(|error| panic!("{error}\n{text}"));
        let plan =
            Plan::new(&ask(&parse(words).expect("well spelt")).expect("asked").request).expect("a plan");
        assert_eq!(topology.tensor_parallel_size(), plan.ranks.len());
        let limits = plan.request.limits;
        assert_eq!(topology.max_model_len(), Some(limits.max_model_len));
        assert_eq!(topology.max_num_batched_tokens(), limits.max_num_batched_tokens);
        assert_eq!(topology.max_num_seqs(), limits.max_num_seqs);
        let is_told = text.contains("plans gpt-oss-120b and does not run it");
        assert_eq!(is_told, words[0] == "gpt-oss-120b", "{text}");
        // What it may use of a card is what was planned with, less a thousandth.
        let part = topology.gpu_memory_utilization();
        for rank in &plan.ranks {
            let usable = (rank.memory_bytes.expect("known") as f64 * part) as u64;
            assert!(rank.usable_bytes.is_some_and(|planned| usable <= planned), "{part}");
        }
        let request = PlanRequest { utilization: Some(part), ..plan.request };
        assert!(Plan::new(&request).expect("a plan").fits());
    }
}

/// What `consort serve` answers before it loads anything.
fn served(text: &str) -> Result<String, EngineError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("emitted.toml");
    fs::write(&file, text).expect("written");
    crate::Engine::from_toml(&file).environment(Environment::empty()).effective_config()
}

#[test]
fn serve_takes_what_is_emitted_for_a_checkpoint() {
    let folder = checkpoint();
    let cases: [&[&str]; 13] = [
        &[],
        &["--dtype", "auto"],
        &["--dtype", "float32"],
        &["--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16"],
        &["--max-num-seqs", "600"],
        &["--max-num-batched-tokens", "64"],
        &["--block-size", "32", "--max-model-len", "1000"],
        &["--kv-cache-memory-bytes", "64MiB"],
        &["--gpus", "2xL40S"],
        &["--gpus", "3xH100-80GB", "--max-num-seqs", "4096"],
        &["--gpus", "L40S", "--max-num-batched-tokens", "100"],
        &["--gpus", "L40S", "--gpu-memory-utilization", "0.5"],
        &["--gpus", "L40S", "--dtype", "bfloat16"],
    ];
    for words in cases {
        let words = [&[path(folder.path())], words].concat();
        let text = answered(&[&words[..], &["--emit-toml"]].concat()).text;
        let config = served(&text).unwrap_or_else(|error| panic!("{words:?}: {error}\n{text}"));
        let settings = &json(&words)["settings"];
        for key in [
            "dtype",
            "max_model_len",
            "tensor_parallel_size",
            "data_parallel_size",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
        ] {
            let line = format!("{key} = {} ", settings[key]);
            assert!(config.lines().any(|of_config| of_config.starts_with(&line)), "{line}\n{config}");
        }
    }
}

#[test]
fn what_serve_would_refuse_is_not_emitted() {
    let folder = checkpoint();
    let model = path(folder.path());
    let emitted = "--emit-toml";
    let cases: [(&[&str], &str); 10] = [
        (
            &[model, "--gpus", "L40S", "--dtype", "float32", emitted],
            "bfloat16 on GPUs: float32 is planned only",
        ),
        (&[model, "--gpus", "L40S", "--dtype", "auto", emitted], "bfloat16 on GPUs: float32 is planned only"),
        (
            &[model, "--kv-cache-dtype", "float32", emitted],
            "in bfloat16 beside weights in bfloat16: float32 is",
        ),
        (
            &[model, "--dtype", "float32", "--kv-cache-dtype", "bfloat16", emitted],
            "float32 beside weights in",
        ),
        (
            &[model, "--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "cannot carry max_num_seqs = 64",
        ),
        (&[model, "--max-model-len", "4097"], "4096 positions"),
        (&[model, "--block-size", "24"], "multiple of 16"),
        (
            &["Llama-3.1-8B", "--gpus", "H100", "--max-num-seqs", "300", "--max-num-batched-tokens", "200"],
            "cannot carry max_num_seqs = 300",
        ),
        (&["Llama-3.1-8B", "--gpus", "H100", "--max-model-len", "131073"], "131072 positions"),
        (&["Llama-3.1-8B", "--gpus", "H100", "--block-size", "24"], "multiple of 16"),
    ];
    for (words, said) in cases {
        let error = answer(&parse(words).expect("well spelt"), Style::Plain).err().expect("refused");
        assert_eq!(code(&error), 2, "{words:?}: {error}");
        assert!(error.to_string().contains(said), "{words:?}: {error}");
    }
    // It is planned all the same.
    let planned = json(&[model, "--gpus", "L40S", "--dtype", "auto"]);
    assert_eq!((&planned["fits"], &planned["settings"]["dtype"]), (&true.into(), &"float32".into()));
    assert!(planned["notes"][0].as_str().is_some_and(|note| note.contains("on GPUs")), "{planned}");
}

/// A topology with two replicas, and with values of its own wherever there is room for any.
fn replicated(model: &str, cache: &str) -> String {
    format!(
        "[model]\npath = \"{model}\"\nserved_model_name = \"mine\"\n\
         [parallel]\ndata_parallel_size = 2\nthreads_per_rank = 3\nbatch_invariant = true\nweights = [2, 1]\n\
         [[node]]\ndevices = [\"cpu\", \"cpu\", \"cpu\", \"cpu\"]\n[cache]\n{cache}\n\
         [scheduler]\nmax_waiting_requests = 9\npriority_aging_ms = 7\nasync_scheduling = false\n\
         [server]\nlisten = \"0.0.0.0:1234\"\nmax_body_bytes = 5000\n"
    )
}

#[test]
fn an_emitted_topology_says_all_that_the_planned_one_says() {
    let folder = checkpoint();
    let file = folder.path().join("cluster.toml");
    let cache = "kv_offloading_bytes = \"64MiB\"\nenable_prefix_caching = false\nsalt_per_api_key = false";
    fs::write(&file, replicated(path(folder.path()), cache)).expect("written");
    let taken = |text: &str| {
        Topology::from_toml_str_with(text, &Overrides::default(), &Environment::empty())
            .unwrap_or_else(|error| panic!("{error}\n{text}"))
    };
    let expected = |overrides: &Overrides| {
        let overrides = Overrides { max_model_len: Some(512), ..overrides.clone() };
        Topology::load_with(&file, &overrides, &Environment::empty()).expect("a topology")
    };
    let words = [path(&file), "--max-model-len", "512", "--emit-toml"];
    let text = answered(&words).text;
    assert_eq!(taken(&text), expected(&Overrides::default()), "{text}");
    served(&text).expect(&text);
    // On cards, which are shared out over the replicas; shares of other ranks mean nothing there.
    for (gpus, devices, weights) in
        [("4xL40S", "cuda:0,cuda:1,cuda:2,cuda:3", None), ("2xL40S", "cuda:0,cuda:1", Some("1"))]
    {
        let text = answered(&[&words[..], &["--gpus", gpus]].concat()).text;
        let overrides = Overrides {
            devices: Some(devices.to_owned()),
            weights: weights.map(str::to_owned),
            // As a server on cards has it.
            isolates_gpus: true,
            ..Overrides::default()
        };
        assert!(text.contains("isolation = \"process\"\n"), "{text}");
        assert_eq!(taken(&text), expected(&overrides), "{text}");
        served(&text).expect(&text);
    }
    let error = answer(&parse(&[path(&file), "--gpus", "5xL40S"]).expect("well spelt"), Style::Plain);
    let error = error.err().expect("refused");
    assert_eq!(code(&error), 2);
    assert!(
        error.to_string().contains("5 cards cannot be shared out over the topology's 2 replicas"),
        "{error}"
    );
}

#[test]
fn replicas_are_told_of_with_the_users_of_one_and_of_all() {
    let folder = checkpoint();
    let file = folder.path().join("cluster.toml");
    fs::write(&file, replicated(path(folder.path()), "kv_offloading_bytes = \"64MiB\"")).expect("written");
    let words = [path(&file), "--gpus", "3xL40S,1x24GB"];
    let planned = json(&words);
    assert_eq!(
        (&planned["settings"]["tensor_parallel_size"], &planned["settings"]["data_parallel_size"]),
        (&2.into(), &2.into())
    );
    // Of the cards that two replicas have for a rank, the one with the least memory decides.
    let cards: Vec<_> =
        planned["ranks"].as_array().expect("ranks").iter().map(|rank| &rank["device"]).collect();
    assert_eq!(cards[0], "L40S");
    assert_eq!(planned["ranks"][1]["memory_bytes"], 24_000_000_000_u64);
    let users = |list: &str| planned[list][0]["windows_freed"].as_u64().expect("a number");
    assert!(users("users") > 0);
    assert_eq!(users("users_of_all_replicas"), 2 * users("users"));
    assert_eq!(planned["settings"]["kv_offloading_bytes"], 64 << 20);
    let text = answered(&words).text;
    for part in [
        "2 replicas of 2 ranks each",
        "users of a replica at once, with tokens each:",
        "users of all 2 replicas at once:",
        "67.1 MB of the host's memory for evicted pages, 134.2 MB for all replicas",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn what_is_kept_of_evicted_pages_must_be_in_the_hosts_memory() {
    let folder = checkpoint();
    let file = folder.path().join("cluster.toml");
    fs::write(&file, replicated(path(folder.path()), "kv_offloading_bytes = \"1000TiB\"")).expect("written");
    let problem = answered(&[path(&file)]).problem.expect("no machine has so much");
    assert!(problem.contains("kv_offloading_bytes asks for 2199.0 TB over 2 replicas"), "{problem}");
    let config = crate::Engine::from_toml(&file).environment(Environment::empty()).effective_config();
    assert!(matches!(config, Err(EngineError::DoesNotFit { .. })), "{config:?}");
    // Without a cache of prefixes nothing is kept.
    let cache = "kv_offloading_bytes = \"1000TiB\"\nenable_prefix_caching = false";
    fs::write(&file, replicated(path(folder.path()), cache)).expect("written");
    assert!(answered(&[path(&file)]).problem.is_none());
}

#[test]
fn a_checkpoint_in_float32_is_not_said_to_be_in_bfloat16() {
    let folder = checkpoint();
    let args = parse(&[path(folder.path()), "--dtype", "float32"]).expect("well spelt");
    let mut request = ask(&args).expect("asked").request;
    let bytes = |request: &PlanRequest| -> u64 {
        let plan = Plan::new(request).expect("a plan");
        let model: u64 = plan.ranks.iter().map(|rank| rank.model_bytes()).sum();
        model + plan.pool_pages() as u64 * plan.page_bytes()
    };
    let bf16 = WeightFormat::BFloat16;
    let half = PlanRequest { format: bf16, kv_format: bf16.kv(), ..request.clone() };
    request.host_memory_bytes = Some(bytes(&half));
    let plan = Plan::new(&request).expect("a plan");
    let change = Change::Format { format: bf16, is_stored: false };
    assert!(plan.changes().contains(&change), "{}", plan.verdict());
    assert!(!plan.verdict().contains("as the checkpoint holds it"), "{}", plan.verdict());
}

#[test]
fn a_folder_is_planned_from_its_headers_alone() {
    let folder = checkpoint();
    let on_cards = json(&[path(folder.path()), "--gpus", "2xL40S"]);
    assert_eq!(on_cards["fits"], true, "{on_cards}");
    let bytes = on_cards["model"]["stored_bytes"].as_u64().expect("read from the headers");
    // Weights are stored in 32 bits, and held in 16.
    assert_eq!(bytes, 4 * on_cards["model"]["parameters"].as_u64().expect("counted"));
    assert_eq!(on_cards["model"]["stored_as"], "float32");
    assert_eq!(on_cards["settings"]["dtype"], "bfloat16");
    // A default that is for processors does not hold for cards.
    assert_eq!(on_cards["settings"]["max_num_batched_tokens"], 2048);
    let on_host = json(&[path(folder.path())]);
    assert_eq!(on_host["ranks"][0]["device"], "cpu");
    assert_eq!(on_host["steps"], serde_json::json!([]));
    assert!(on_host["notes"][0].as_str().is_some_and(|note| note.contains("processor")), "{on_host}");
    let toml = answered(&[path(folder.path()), "--emit-toml"]).text;
    let taken = Topology::from_toml_str_with(&toml, &Overrides::default(), &Environment::empty());
    assert_eq!(taken.expect(&toml).model_path(), folder.path());
}

#[test]
fn a_configuration_alone_is_enough_for_models_that_are_only_planned() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "vocab_size": 151_936, "tie_word_embeddings": false,
    });
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let here = json(&[path(folder.path()), "--gpus", "L40S"]);
    let named = json(&["Qwen3-8B", "--gpus", "L40S"]);
    for part in ["weight_bytes", "ranks", "cache", "users", "steps", "settings"] {
        assert_eq!(here[part], named[part], "{part}");
    }
    assert_eq!(named["users"][3]["paged"], Value::Null, "beyond what the model was trained for");
    let error =
        answer(&parse(&[path(folder.path())]).expect("well spelt"), Style::Plain).err().expect("refused");
    assert_eq!(code(&error), 2, "{error}");
}

#[test]
fn a_topology_is_planned_as_the_engine_would_run_it() {
    let folder = checkpoint();
    let file = folder.path().join("cluster.toml");
    let text = format!(
        "[model]\npath = \"{}\"\nmax_model_len = 1024\n[parallel]\ntensor_parallel_size = 2\nweights = [2, 1]\n\
         [cache]\nkv_cache_memory_bytes = \"1MiB\"\n",
        path(folder.path())
    );
    fs::write(&file, text).expect("written");
    let planned = json(&[path(&file)]);
    assert_eq!(planned["settings"]["kv_cache_memory_bytes"], 1 << 20);
    assert_eq!(planned["settings"]["max_model_len"], 1024);
    let heads: Vec<u64> = planned["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .filter_map(|rank| rank["query_heads"].as_u64())
        .collect();
    assert_eq!(heads, [4, 2]);
    // The engine's own figure, from the same computation.
    let config = crate::Engine::from_toml(&file).environment(Environment::empty()).effective_config();
    let config = config.expect("it fits");
    assert!(config.contains("kv_cache_memory_bytes = 1048576"), "{config}");
    assert_eq!(planned["cache"]["pages"], planned["cache"]["pool_pages"]);
    // Where nobody says how much memory there is, the engine tells its blocks: no more than all sequences could use.
    for max_num_seqs in [2, 65_536] {
        let text = format!(
            "[model]\npath = \"{}\"\nmax_model_len = 1024\n[scheduler]\nmax_num_seqs = {max_num_seqs}\n",
            path(folder.path())
        );
        fs::write(&file, text).expect("written");
        let cache = json(&[path(&file)])["cache"].clone();
        let config = crate::Engine::from_toml(&file).environment(Environment::empty()).effective_config();
        let config = config.expect("it fits");
        let blocks = format!("# computed: {} blocks, over all ranks", cache["pool_pages"]);
        assert!(config.contains(&blocks), "{blocks}\n{config}");
        let expected = if max_num_seqs == 2 { Value::from(128) } else { cache["pages"].clone() };
        assert_eq!(cache["pool_pages"], expected);
    }
    fs::write(&file, "[model]\npath = \"nowhere\"\n").expect("written");
    let error = answer(&parse(&[path(&file)]).expect("well spelt"), Style::Plain).err().expect("refused");
    assert_eq!(code(&error), 2, "only what does not fit ends with 1: {error}");
}

#[test]
fn a_drawing_has_a_bar_for_each_rank_and_escapes_what_it_names() {
    let words = [&HEADLINE[..], &["--svg", "plan.svg"]].concat();
    let svg = answered(&words).svg.expect("asked for");
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert_eq!(svg.matches("<title>weights: ").count(), 3);
    assert_eq!(svg.matches("<title>keys and values: ").count(), 3);
    assert!(!svg.contains("#c0392b"), "nothing is beyond the memory");
    let short = ["gpt-oss-120b", "--gpus", "1x80GB@1TBps", "--dtype", "bfloat16", "--svg", "plan.svg"];
    assert!(answered(&short).svg.expect("asked for").contains("#c0392b"), "what does not fit shows");
    let args = parse(&["Llama-3.1-8B", "--gpus", "H100"]).expect("well spelt");
    let mut asked = ask(&args).expect("asked");
    asked.request.model.name = "<a & \"b\">\u{1b}".to_owned();
    let drawn = svg::svg(&Report::new(&Plan::new(&asked.request).expect("a plan"), &asked));
    assert!(drawn.contains("&lt;a &amp; &quot;b&quot;&gt;") && !drawn.contains('\u{1b}'), "{drawn}");
}
