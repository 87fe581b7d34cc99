use serde_json::json;

use super::*;

/// Metadata of the real members, each with these dependencies (name and kind).
fn workspace(extra: &[(&str, &str, Option<&str>)]) -> Value {
    let mut edges = vec![
        ("consort-parallel", "consort-kernels", None),
        ("consort-actors", "consort-parallel", None),
        ("consort", "consort-actors", None),
        ("consort", "consort-kernels", None),
        ("consort-examples", "consort", None),
        ("consort-cluster-tests", "consort", Some("dev")),
        ("consort", "serde", None),
        ("xtask", "anyhow", None),
        ("xtask", "consort-kernels", None),
    ];
    edges.extend_from_slice(extra);
    let names = LAYERS.iter().copied().flatten().chain(APART);
    let packages = names.map(|name| {
        let own = edges.iter().filter(|(from, ..)| from == name);
        let own = own.map(|(_, to, kind)| json!({"name": to, "kind": kind})).collect::<Vec<_>>();
        json!({"name": name, "dependencies": own})
    });
    json!({"packages": packages.collect::<Vec<_>>()})
}

#[test]
fn the_arrows_as_drawn_pass() {
    assert_eq!(check(&workspace(&[])).unwrap(), Findings::default());
}

#[test]
fn a_planted_back_edge_is_refused() {
    let found = check(&workspace(&[("consort-kernels", "consort-actors", None)])).unwrap();
    assert_eq!(found.errors.len(), 1);
    assert!(found.errors[0].starts_with("consort-kernels depends on consort-actors (normal"), "{found:?}");
}

#[test]
fn a_back_edge_among_dev_dependencies_is_refused_too() {
    let found = check(&workspace(&[("consort-actors", "consort", Some("dev"))])).unwrap();
    assert!(found.errors[0].starts_with("consort-actors depends on consort (dev"), "{found:?}");
}

#[test]
fn crates_of_one_layer_and_xtask_stay_apart() {
    let edges = [
        ("consort-examples", "consort-cluster-tests", None),
        ("xtask", "consort-parallel", None),
        ("consort", "xtask", Some("build")),
    ];
    assert_eq!(check(&workspace(&edges)).unwrap().errors.len(), 3);
}

#[test]
fn what_is_for_tests_may_only_be_used_by_tests_and_its_like() {
    let among_themselves = [("consort-software-driver", "consort-emulator", None)];
    assert_eq!(check(&workspace(&among_themselves)).unwrap(), Findings::default());
    assert_eq!(
        check(&workspace(&[("consort-kernels", "consort-software-driver", Some("dev"))])).unwrap(),
        Findings::default()
    );
    let found = check(&workspace(&[("consort-kernels", "consort-software-driver", None)])).unwrap();
    assert!(found.errors[0].contains("which is for tests only"), "{found:?}");
}

#[test]
fn a_new_crate_must_be_given_its_place() {
    let mut metadata = workspace(&[]);
    let packages = metadata["packages"].as_array_mut().unwrap();
    packages.push(json!({"name": "consort-new", "dependencies": []}));
    let found = check(&metadata).unwrap();
    assert!(found.errors[0].contains("consort-new has no place"), "{found:?}");
}

#[test]
fn output_without_packages_is_an_error() {
    assert!(check(&json!({})).is_err());
}
