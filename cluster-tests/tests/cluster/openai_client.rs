//! OpenAI's own Python client against the real server.

use std::{path::PathBuf, process::Command, time::Duration};

use crate::harness::{Served, one_model_at_a_time, root};

/// Installs the pinned clients under the target folder once; returns their place.
fn python_packages() -> PathBuf {
    let requirements = root().join("cluster-tests/clients/requirements.txt");
    let wanted = std::fs::read_to_string(&requirements).unwrap();
    let folder = root().join("target/python-clients");
    let stamp = folder.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return folder;
    }
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"])
        .arg(&folder)
        .arg("--requirement")
        .arg(&requirements)
        .status()
        .expect("python3 is needed for the tests with real clients");
    assert!(status.success(), "pip could not install {wanted}");
    std::fs::write(stamp, wanted).unwrap();
    folder
}

#[test]
fn openais_python_client_streams_a_chat() {
    let packages = python_packages();
    let _guard = one_model_at_a_time();
    let topology = root().join("examples/topologies/three-cpu-shards.toml");
    let server = Served::start(topology.to_str().unwrap(), &[]);
    let output = Command::new("python3")
        .arg(root().join("cluster-tests/clients/openai_chat.py"))
        .arg(format!("{}/v1", server.url))
        .env("PYTHONPATH", packages)
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("all checks passed"), "{out}{err}");
    server.terminate();
    assert_eq!(server.end(Duration::from_secs(20)).0, Some(0));
}
