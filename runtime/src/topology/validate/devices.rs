//! Devices of the ranks, and their shares.

use super::{
    super::{
        DeviceSpec,
        error::Violations,
        excerpt::shown,
        raw::{Leaf, Origin, RawNode, RawTopology, Sourced},
        suggest,
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
            let listed = number(devices.len(), "device");
            let problem = format!("{}, but [[node]] lists {listed}", number(count, "rank"));
            let remedy = format!(
                "set it to {}, or list {}, or leave one of the two out",
                devices.len(),
                number(count, "device")
            );
            let Some(other) = nodes.iter().find_map(|node| node.devices.as_ref()) else { return devices };
            let note = (&other.origin, format!("{listed} in all, from here on"));
            fields.violations.add_clash((SIZE_KEY, &size.origin), problem, remedy, note);
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
            format!("\"{}\" is another machine, and this version runs all ranks on one", shown(&given.value)),
            "remove the key, or set it to \"localhost\"",
        );
    }
}

fn device(key: &str, given: &Sourced<String>, violations: &mut Violations) -> DeviceSpec {
    let name = given.value.trim();
    let told = shown(name);
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
            format!("\"{told}\" is a GPU, and this build has no CUDA backend yet"),
            "use \"cpu\"",
        ),
        _ if name.starts_with("GPU-") => violations.add(
            key,
            &given.origin,
            format!("\"{told}\" names a GPU, and this build has no CUDA backend yet"),
            "use \"cpu\"",
        ),
        _ => {
            // Not for `gpu`, which is no misspelling.
            let remedy = match suggest::nearest(name, ["cpu"]).filter(|_| name.starts_with(['c', 'C'])) {
                Some(meant) => format!("did you mean \"{meant}\"?"),
                None => "use \"cpu\" or \"cpu:N\" (\"cuda:N\" once this build has a CUDA backend)".to_owned(),
            };
            violations.add(key, &given.origin, format!("\"{told}\" is no device"), remedy);
        }
    }
    DeviceSpec::Cpu(None)
}

/// Relative shares: one positive number for each rank.
pub(super) fn weights(raw: &RawTopology, ranks: usize, violations: &mut Violations) -> Option<Vec<f64>> {
    let given = raw.parallel.weights.as_ref()?;
    let key = "parallel.weights";
    if given.value.len() != ranks {
        let problem = format!("{} for {}", number(given.value.len(), "weight"), number(ranks, "rank"));
        let remedy = format!("give {}, one for each rank in order", number(ranks, "number"));
        match ranks_origin(raw) {
            Some(other) => {
                let note = (other, format!("{} here", number(ranks, "rank")));
                violations.add_clash((key, &given.origin), problem, remedy, note);
            }
            None => violations.add(key, &given.origin, problem, remedy),
        }
    }
    // Shares are reckoned in f32.
    let is_share = |weight: f64| (weight as f32).is_finite() && weight as f32 > 0.0;
    for bad in given.value.iter().filter(|weight| !is_share(weight.value)) {
        let problem = format!("{:?} is no share of a model", bad.value);
        violations.add(key, &bad.origin, problem, "give positive numbers, such as [2, 1, 1]");
    }
    Some(given.value.iter().map(|weight| weight.value).collect())
}

/// What says how many ranks there are.
fn ranks_origin(raw: &RawTopology) -> Option<&Origin> {
    let devices = || raw.node.iter().find_map(|node| Some(&node.devices.as_ref()?.origin));
    raw.parallel.tensor_parallel_size.as_ref().map(|size| &size.origin).or_else(devices)
}

/// `1 rank`, `2 ranks`.
fn number(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
