//! Devices of the ranks, and their shares.

use super::{
    super::{
        DeviceSpec,
        error::Violations,
        raw::{Leaf, RawNode, Sourced},
    },
    Fields, RANKS_MAX,
};

const SIZE_KEY: &str = "parallel.tensor_parallel_size";

/// One device per rank. The number of ranks and the list of devices each imply the other.
pub(super) fn devices(size: &Leaf<i64>, nodes: &[RawNode], fields: &mut Fields) -> Vec<DeviceSpec> {
    let count = fields.optional_count(SIZE_KEY, size, RANKS_MAX);
    let mut devices = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        host(at, &node.host, &mut fields.violations);
        let key = format!("node[{at}].devices");
        match &node.devices {
            Some(listed) if !listed.value.is_empty() => {
                devices.extend(listed.value.iter().map(|name| device(&key, name, &mut fields.violations)));
            }
            Some(listed) => {
                fields.violations.add(
                    key,
                    &listed.origin,
                    "no device is listed",
                    "list at least one, such as \"cpu\"",
                );
            }
            None => fields.violations.add_missing(
                &key,
                "it is missing",
                "list the node's devices, such as [\"cpu\"]",
            ),
        }
    }
    if devices.len() > RANKS_MAX as usize {
        let problem = format!("{} devices are listed", devices.len());
        fields.violations.add_missing("node", &problem, &format!("list at most {RANKS_MAX}"));
    }
    match (size, count) {
        (Some(size), Some(count)) if !devices.is_empty() && devices.len() != count => {
            let listed = devices.len();
            fields.violations.add(
                SIZE_KEY,
                &size.origin,
                format!("{count} ranks, but [[node]] lists {listed} devices"),
                format!("set it to {listed}, or list {count} devices, or leave one of the two out"),
            );
        }
        (_, count) if devices.is_empty() => devices = vec![DeviceSpec::Cpu(None); count.unwrap_or(1)],
        _ => {}
    }
    devices
}

fn host(at: usize, host: &Leaf<String>, violations: &mut Violations) {
    let Some(given) = host else { return };
    let name = given.value.trim();
    let name =
        name.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(name, |(name, _)| name);
    if !matches!(name, "localhost" | "127.0.0.1" | "[::1]" | "::1") {
        violations.add(
            format!("node[{at}].host"),
            &given.origin,
            format!("\"{}\" is another machine, and this version runs all ranks on one", given.value),
            "remove the key, or set it to \"localhost\"",
        );
    }
}

fn device(key: &str, given: &Sourced<String>, violations: &mut Violations) -> DeviceSpec {
    let name = given.value.trim();
    let (kind, index) = match name.split_once(':') {
        Some((kind, index)) => (kind, Some(index.parse::<u16>())),
        None => (name, None),
    };
    match (kind, index) {
        ("cpu", None) => return DeviceSpec::Cpu(None),
        ("cpu", Some(Ok(index))) => return DeviceSpec::Cpu(Some(index)),
        ("cuda", None | Some(Ok(_))) => violations.add(
            key,
            &given.origin,
            format!("\"{name}\" is a GPU, and this build has no CUDA backend yet"),
            "use \"cpu\"",
        ),
        _ if name.starts_with("GPU-") => violations.add(
            key,
            &given.origin,
            format!("\"{name}\" names a GPU, and this build has no CUDA backend yet"),
            "use \"cpu\"",
        ),
        _ => violations.add(
            key,
            &given.origin,
            format!("\"{name}\" is no device"),
            "use \"cpu\" or \"cpu:N\" (\"cuda:N\" once this build has a CUDA backend)",
        ),
    }
    DeviceSpec::Cpu(None)
}

/// Relative shares: one positive number for each rank.
pub(super) fn weights(given: Leaf<Vec<f64>>, ranks: usize, violations: &mut Violations) -> Option<Vec<f64>> {
    let given = given?;
    let key = "parallel.weights";
    if given.value.len() != ranks {
        let problem = format!("{} weights for {ranks} ranks", given.value.len());
        violations.add(
            key,
            &given.origin,
            problem,
            format!("give {ranks} numbers, one for each rank in order"),
        );
    }
    if let Some(bad) = given.value.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
        let problem = format!("{bad} is no share of a model");
        violations.add(key, &given.origin, problem, "give positive numbers, such as [2, 1, 1]");
    }
    Some(given.value)
}
