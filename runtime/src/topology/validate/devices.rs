//! Devices of the ranks, what may stand beside each other, and their shares.

use std::{cmp::Ordering, net::IpAddr};

use super::{
    super::{
        DeviceSpec,
        error::Violations,
        excerpt::shown,
        raw::{Leaf, Origin, RawNode, RawParallel, RawTopology, Sourced},
    },
    Fields, RANKS_MAX,
};

const SIZE_KEY: &str = "parallel.tensor_parallel_size";
const REPLICAS_KEY: &str = "parallel.data_parallel_size";
const DEVICES_KEY: &str = "node.devices";

/// What runs where.
pub(super) struct Placement {
    /// Of each rank, replica by replica: as many for each.
    pub(super) devices: Vec<DeviceSpec>,
    /// At least one.
    pub(super) replicas: usize,
}

/// Where the number of ranks and the devices contradict each other and come from different layers, the lower layer
/// gives way: a flag wins over a file whichever of the two it says.
pub(super) fn settle(raw: &mut RawTopology) {
    let devices = || raw.node.iter().filter_map(|node| node.devices.as_ref());
    let Some(size) = &raw.parallel.tensor_parallel_size else { return };
    let Some(first) = devices().next() else { return };
    let total = devices().map(|list| list.value.len()).sum::<usize>();
    let replicas = raw.parallel.data_parallel_size.as_ref();
    let needed = size.value.saturating_mul(replicas.map_or(1, |replicas| replicas.value));
    if i64::try_from(total).is_ok_and(|total| total == needed) {
        return;
    }
    let layer =
        replicas.map_or(size.origin.layer(), |replicas| replicas.origin.layer().max(size.origin.layer()));
    match layer.cmp(&first.origin.layer()) {
        Ordering::Less => raw.parallel.tensor_parallel_size = None,
        // Nodes elsewhere stay, to be refused: nothing is run here that was meant for another machine. So do GPUs:
        // nothing is run on a CPU that was meant for them, and which of them to use is not ours to choose.
        Ordering::Greater => raw.node.retain(|node| {
            let is_gpu = |device: &Sourced<String>| {
                DeviceSpec::parse(&device.value).is_ok_and(|device| !device.is_cpu())
            };
            node.host.as_ref().is_some_and(|host| !is_here(&host.value))
                || node.devices.as_ref().is_some_and(|listed| listed.value.iter().any(is_gpu))
        }),
        Ordering::Equal => {}
    }
}

/// One device for each rank of each replica. The number of ranks and the list of devices each imply the other.
pub(super) fn placement(parallel: &RawParallel, nodes: &[RawNode], fields: &mut Fields) -> Placement {
    let count = fields.optional_count(SIZE_KEY, &parallel.tensor_parallel_size, RANKS_MAX);
    let mut replicas =
        fields.optional_count(REPLICAS_KEY, &parallel.data_parallel_size, RANKS_MAX).unwrap_or(1);
    if let (Some(size), Some(given)) = (count, &parallel.data_parallel_size)
        && size * replicas > RANKS_MAX as usize
    {
        let problem = format!("{} of {} are too many", number(replicas, "replica"), number(size, "rank"));
        let remedy = format!("use at most {RANKS_MAX} ranks in all");
        fields.violations.add(REPLICAS_KEY, &given.origin, problem, remedy);
        replicas = 1;
    }
    let devices = listed_devices(nodes, fields);
    if devices.is_empty() {
        let ranks = count.unwrap_or(1) * replicas;
        return Placement { devices: vec![DeviceSpec::Cpu(None); ranks], replicas };
    }
    let ranks = count.unwrap_or(devices.len() / replicas).max(1);
    if devices.len() == ranks * replicas {
        return Placement { devices, replicas };
    }
    disagree(parallel, nodes, (count, replicas, devices.len()), fields);
    // Something that can be held against the model: what the devices say, if they are as many for each replica.
    match devices.len().is_multiple_of(replicas) {
        true => Placement { devices, replicas },
        false => Placement { devices: vec![DeviceSpec::Cpu(None); ranks * replicas], replicas },
    }
}

/// Tells that there are not as many devices as the numbers of ranks and replicas ask for.
fn disagree(
    parallel: &RawParallel,
    nodes: &[RawNode],
    (count, replicas, devices): (Option<usize>, usize, usize),
    fields: &mut Fields,
) {
    let Some(other) = nodes.iter().find_map(|node| node.devices.as_ref()) else { return };
    let listed = number(devices, "device");
    let note = (&other.origin, format!("{listed} in all, from here on"));
    let (key, given, problem, remedy) =
        match (count, &parallel.tensor_parallel_size, &parallel.data_parallel_size) {
            (Some(count), Some(size), _) if replicas == 1 => {
                let problem = format!("{}, but [[node]] lists {listed}", number(count, "rank"));
                let wanted = number(count, "device");
                let remedy = format!("set it to {devices}, or list {wanted}, or leave one of the two out");
                (SIZE_KEY, size, problem, remedy)
            }
            (Some(count), Some(size), _) => {
                let of_each = number(count, "rank");
                let problem = format!("{replicas} replicas of {of_each}, but [[node]] lists {listed}");
                (SIZE_KEY, size, problem, format!("list {}: those of replica 0 first", count * replicas))
            }
            (_, _, Some(size)) => {
                let problem = format!("{replicas} replicas, but [[node]] lists {listed}");
                let remedy = "list as many devices for each replica, those of replica 0 first".to_owned();
                (REPLICAS_KEY, size, problem, remedy)
            }
            _ => return,
        };
    fields.violations.add_clash((key, &given.origin), problem, remedy, note);
}

/// The devices of all nodes, in their order; none where none is listed.
fn listed_devices(nodes: &[RawNode], fields: &mut Fields) -> Vec<DeviceSpec> {
    let (mut devices, mut company) = (Vec::new(), Company::default());
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
                for given in &listed.value {
                    devices.push(device(&key, given, &mut company, &mut fields.violations));
                }
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

/// The device of that name; the CPU stands in for one that there is not.
fn device<'a>(
    key: &str,
    given: &'a Sourced<String>,
    company: &mut Company<'a>,
    violations: &mut Violations,
) -> DeviceSpec {
    match DeviceSpec::parse(&given.value) {
        Ok(device) => {
            company.admit(key, device, given, violations);
            device
        }
        Err((problem, remedy)) => {
            violations.add(key, &given.origin, problem, remedy);
            DeviceSpec::Cpu(None)
        }
    }
}

/// The devices of one replica so far, each with its place: what may stand beside them.
#[derive(Default)]
struct Company<'a> {
    first: Option<(DeviceSpec, &'a Sourced<String>)>,
    gpus: Vec<(DeviceSpec, &'a Sourced<String>)>,
    /// Whether it was told that kinds are mixed: once is enough.
    is_mixed: bool,
}

impl<'a> Company<'a> {
    fn admit(
        &mut self,
        key: &str,
        device: DeviceSpec,
        given: &'a Sourced<String>,
        violations: &mut Violations,
    ) {
        let (first, first_given) = *self.first.get_or_insert((device, given));
        if first.is_cpu() != device.is_cpu() && !self.is_mixed {
            self.is_mixed = true;
            violations.add_clash(
                (key, &given.origin),
                format!("\"{device}\" beside \"{first}\": ranks of one replica sum their parts on one kind of device"),
                "list GPUs only, or CPUs only".to_owned(),
                (&first_given.origin, format!("\"{first}\" is the first")),
            );
        }
        if device.is_cpu() {
            return;
        }
        // As many GPUs as a machine has: looking through them all is nothing.
        match self.gpus.iter().find(|(other, _)| *other == device) {
            Some((_, other)) => violations.add_clash(
                (key, &given.origin),
                format!("\"{device}\" is listed twice, and two ranks cannot share a card"),
                "list another card, or one rank less".to_owned(),
                (&other.origin, "the first time is here".to_owned()),
            ),
            None => self.gpus.push((device, given)),
        }
    }
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
