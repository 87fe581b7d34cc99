//! Devices of the ranks, and their shares.

use std::{cmp::Ordering, net::IpAddr};

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
const DEVICES_KEY: &str = "node.devices";

/// Where the number of ranks and the devices contradict each other and come from different layers, the lower layer
/// gives way: a flag wins over a file whichever of the two it says.
pub(super) fn settle(raw: &mut RawTopology) {
    let devices = || raw.node.iter().filter_map(|node| node.devices.as_ref());
    let Some(size) = &raw.parallel.tensor_parallel_size else { return };
    let Some(first) = devices().next() else { return };
    let total = devices().map(|list| list.value.len()).sum::<usize>();
    if i64::try_from(total).is_ok_and(|total| total == size.value) {
        return;
    }
    match size.origin.layer().cmp(&first.origin.layer()) {
        Ordering::Less => raw.parallel.tensor_parallel_size = None,
        // Nodes elsewhere stay, to be refused: nothing is run here that was meant for another machine.
        Ordering::Greater => {
            raw.node.retain(|node| node.host.as_ref().is_some_and(|host| !is_here(&host.value)));
        }
        Ordering::Equal => {}
    }
}

/// One device per rank. The number of ranks and the list of devices each imply the other.
pub(super) fn devices(size: &Leaf<i64>, nodes: &[RawNode], fields: &mut Fields) -> Vec<DeviceSpec> {
    let count = fields.optional_count(SIZE_KEY, size, RANKS_MAX);
    let mut devices = Vec::new();
    let listed = || nodes.iter().filter_map(|node| node.devices.as_ref());
    let total = listed().map(|list| list.value.len()).sum::<usize>().max(nodes.len());
    if total > RANKS_MAX as usize {
        // Before each of them is looked at.
        let problem = format!("{total} devices are listed");
        let remedy = format!("list at most {RANKS_MAX}");
        match listed().next() {
            Some(first) => fields.violations.add(DEVICES_KEY, &first.origin, problem, remedy),
            None => fields.violations.add_missing("node", &problem, &remedy),
        }
        return vec![DeviceSpec::Cpu(None)];
    }
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
    if !is_here(&given.value) {
        violations.add(
            format!("node[{at}].host"),
            &given.origin,
            format!("\"{}\" is another machine, and this version runs all ranks on one", shown(&given.value)),
            "remove the key, or set it to \"localhost\"",
        );
    }
}

/// Whether a host, perhaps with a port, names this machine.
fn is_here(host: &str) -> bool {
    let name = host.trim();
    // An address with colons of its own is no name with a port.
    let without_port = match name.rsplit_once(':') {
        Some((before, port)) if name.parse::<IpAddr>().is_err() && port.parse::<u16>().is_ok() => before,
        _ => name,
    };
    let bare = without_port.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(without_port);
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
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
    // Of a file that could not be read, nobody knows how many ranks it asks for.
    let is_sane = |size: &Sourced<i64>| (1..=RANKS_MAX).contains(&size.value);
    let is_known = (!violations.is_unread() || ranks_origin(raw).is_some())
        && raw.parallel.tensor_parallel_size.as_ref().is_none_or(is_sane);
    if given.value.len() != ranks && is_known {
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
        if violations.is_full() {
            break;
        }
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
