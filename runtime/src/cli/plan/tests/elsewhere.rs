//! Plans for another machine than the one that plans.

use super::*;

fn topology(folder: &TempDir, rest: &str) -> std::path::PathBuf {
    let file = folder.path().join("cluster.toml");
    fs::write(&file, format!("[model]\npath = \"{}\"\n{rest}", path(folder.path()))).expect("written");
    file
}

#[test]
fn a_topology_is_emitted_without_the_key_that_only_its_server_has() {
    let folder = checkpoint();
    let variable = "CONSORT_TEST_KEY_THAT_NOBODY_HAS";
    let server =
        format!("[server]\nlisten = \"0.0.0.0:1234\"\napi_key_env = \"{variable}\"\nmax_body_bytes = 5000\n");
    let file = topology(&folder, &server);
    assert!(answered(&[path(&file)]).problem.is_none());
    let text = answered(&[path(&file), "--emit-toml"]).text;
    for line in
        [&format!("api_key_env = \"{variable}\""), "listen = \"0.0.0.0:1234\"", "max_body_bytes = 5000"]
    {
        assert!(text.contains(line), "{line}\n{text}");
    }
    // The server itself needs the key.
    let taken =
        |environment: &Environment| Topology::from_toml_str_with(&text, &Overrides::default(), environment);
    assert!(taken(&Environment::empty()).is_err());
    let keyed = taken(&Environment::from_iter([(variable, "secret")])).expect(&text);
    assert_eq!(keyed.api_keys()[0].reveal(), "secret");
    // What is no name may be the key, and is written nowhere.
    let file = topology(&folder, "[server]\napi_key_env = \"sk-live 1234\"\n");
    let error = answer(&parse(&[path(&file), "--emit-toml"]).expect("well spelt"), Style::Plain);
    let error = format!("{:#}", error.err().expect("refused"));
    assert!(error.contains("not the name of an environment variable") && !error.contains("1234"), "{error}");
}

#[test]
fn a_topology_in_float32_is_planned_on_cards_as_the_flag_is() {
    let folder = checkpoint();
    let file = topology(&folder, "dtype = \"float32\"\n[parallel]\ntensor_parallel_size = 2\n");
    assert_eq!(json(&[path(&file)])["settings"]["dtype"], "float32");
    let on_cards = json(&[path(&file), "--gpus", "2xL40S"]);
    assert_eq!(on_cards, json(&[path(&file), "--gpus", "2xL40S", "--dtype", "float32"]));
    assert_eq!(on_cards["settings"]["kv_cache_dtype"], "float32");
    assert!(on_cards["notes"][0].as_str().is_some_and(|note| note.contains("float32 is planned only")));
    let emitted = [path(&file), "--gpus", "2xL40S", "--emit-toml"];
    let error = answer(&parse(&emitted).expect("well spelt"), Style::Plain).err().expect("refused");
    assert!(error.to_string().contains("plan with --dtype bfloat16"), "{error}");
    let mixed = json(&[path(&file), "--gpus", "2xL40S", "--dtype", "bfloat16"]);
    assert_eq!(mixed["settings"]["dtype"], "bfloat16");
}
