//! The crate arrows: `kernels <- parallel <- actors <- runtime <- {examples, cluster-tests}`, and nothing points back.
//! Below them the emulator and the software driver, which only tests may use.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Findings;

/// Crates by height. A crate may depend on lower ones only, in every kind of dependency, dev included.
const LAYERS: &[&[&str]] = &[
    &["consort-emulator"],
    &["consort-software-driver"],
    &["consort-kernels"],
    &["consort-parallel"],
    &["consort-actors"],
    &["consort"],
    &["consort-examples", "consort-cluster-tests", "consort-device-check"],
];

/// Members that nothing but tests, and each other, may depend on.
const FOR_TESTS: &[&str] = &["consort-emulator", "consort-software-driver"];

/// Members beside the layers: no member depends on them, and they depend on none but those of `BORROWED`.
const APART: &[&str] = &["xtask"];

/// What a member beside the layers may use: xtask compiles the kernels' CUDA texts.
const BORROWED: &[(&str, &str)] = &[("xtask", "consort-kernels")];

/// Checks the output of `cargo metadata --no-deps`.
pub(super) fn check(metadata: &Value) -> Result<Findings> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let name_of = |value: &Value| Some(value["name"].as_str()?.to_owned());
    let members: Vec<String> = packages
        .iter()
        .map(|package| name_of(package).context("a package has no name"))
        .collect::<Result<_>>()?;
    let mut found = Findings::default();
    for (package, member) in packages.iter().zip(&members) {
        if height(member).is_none() && !APART.contains(&member.as_str()) {
            found
                .errors
                .push(format!("crate {member} has no place in the layers of xtask/src/tidy/arrows.rs"));
            continue;
        }
        let dependencies = package["dependencies"].as_array().context("a package lists no dependencies")?;
        for dependency in dependencies {
            let name = name_of(dependency).context("a dependency has no name")?;
            let kind = dependency["kind"].as_str().unwrap_or("normal");
            let for_tests = |name: &str| FOR_TESTS.contains(&name);
            if for_tests(&name) && !for_tests(member) && kind != "dev" {
                found
                    .errors
                    .push(format!("{member} depends on {name} ({kind} dependency), which is for tests only"));
            }
            if members.contains(&name) && !allowed(member, &name) {
                found.errors.push(format!(
                    "{member} depends on {name} ({kind} dependency), against the arrows {}",
                    drawn()
                ));
            }
        }
    }
    Ok(found)
}

fn height(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

fn allowed(from: &str, to: &str) -> bool {
    match (height(from), height(to)) {
        (Some(from), Some(to)) => to < from,
        _ => BORROWED.contains(&(from, to)),
    }
}

fn drawn() -> String {
    LAYERS.iter().map(|layer| layer.join(", ")).collect::<Vec<_>>().join(" <- ")
}

#[cfg(test)]
mod tests;
