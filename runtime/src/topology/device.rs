//! Devices by name: `cpu`, `cpu:N`, `cuda:N`, `cuda:GPU-UUID`.

use std::fmt;

use super::{excerpt::shown, suggest};

/// How every GPU's UUID begins, as `nvidia-smi -L` shows it.
const UUID_PREFIX: &str = "GPU-";
/// Digits of a UUID between its dashes.
const UUID_GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

/// A device of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSpec {
    /// The host's processor; a number names a share of it and has no meaning beyond telling ranks apart.
    Cpu(Option<u16>),
    /// One GPU, the rank's own.
    Cuda(CudaCard),
}

/// Which GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaCard {
    /// The number that CUDA gives it in this process. `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` have a say in it.
    Index(u16),
    /// The card itself, wherever it is plugged.
    Uuid(GpuUuid),
}

/// The name that a GPU has for good.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GpuUuid([u8; 16]);

impl DeviceSpec {
    /// Whether it is the host's processor.
    pub fn is_cpu(&self) -> bool {
        matches!(self, DeviceSpec::Cpu(_))
    }

    /// The device of that name, or what is wrong with it and what to do.
    pub(crate) fn parse(name: &str) -> Result<DeviceSpec, (String, String)> {
        let name = name.trim();
        let (kind, which) = match name.split_once(':') {
            Some((kind, which)) => (kind, Some(which)),
            None => (name, None),
        };
        let index = which.and_then(|which| which.parse::<u16>().ok());
        match (kind, which, index) {
            ("cpu", None, _) => Ok(DeviceSpec::Cpu(None)),
            ("cpu", _, Some(index)) => Ok(DeviceSpec::Cpu(Some(index))),
            ("cuda", _, Some(index)) => Ok(DeviceSpec::Cuda(CudaCard::Index(index))),
            ("cuda", Some(which), _) if which.starts_with(UUID_PREFIX) => match GpuUuid::parse(which) {
                Some(uuid) => Ok(DeviceSpec::Cuda(CudaCard::Uuid(uuid))),
                None => Err(not_a_uuid(which)),
            },
            _ => Err((format!("\"{}\" is no device", shown(name)), remedy(name))),
        }
    }
}

fn not_a_uuid(which: &str) -> (String, String) {
    let remedy =
        "write all of it, as `nvidia-smi -L` shows it: \"cuda:GPU-\" and 8-4-4-4-12 hexadecimal digits";
    (format!("\"{}\" is not the UUID of a GPU", shown(which)), remedy.to_owned())
}

/// What to do about a name that is no device.
fn remedy(name: &str) -> String {
    let gpu = ["gpu", "cuda", "nvidia"].iter().find_map(|kind| {
        let (start, rest) = (name.get(..kind.len())?, &name[kind.len()..]);
        start.eq_ignore_ascii_case(kind).then_some(rest)
    });
    if GpuUuid::parse(name).is_some() {
        return format!("did you mean \"cuda:{name}\"?");
    }
    match gpu.map(|rest| rest.trim_start_matches([':', '-', '_'])) {
        Some("") => "name the card, as in \"cuda:0\"".to_owned(),
        Some(number) if number.parse::<u16>().is_ok() => format!("did you mean \"cuda:{number}\"?"),
        Some(_) => "write \"cuda:N\" with the card's number, or \"cuda:GPU-...\" with its UUID".to_owned(),
        None => match suggest::nearest(name, ["cpu"]).filter(|_| name.starts_with(['c', 'C'])) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None => "use \"cpu\", \"cpu:N\", \"cuda:N\" or \"cuda:GPU-UUID\"".to_owned(),
        },
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Cpu(None) => f.write_str("cpu"),
            DeviceSpec::Cpu(Some(index)) => write!(f, "cpu:{index}"),
            DeviceSpec::Cuda(CudaCard::Index(index)) => write!(f, "cuda:{index}"),
            DeviceSpec::Cuda(CudaCard::Uuid(uuid)) => write!(f, "cuda:{uuid}"),
        }
    }
}

impl GpuUuid {
    /// The UUID as the driver tells it.
    pub fn bytes(&self) -> [u8; 16] {
        self.0
    }

    fn parse(text: &str) -> Option<GpuUuid> {
        let groups: Vec<&str> = text.strip_prefix(UUID_PREFIX)?.split('-').collect();
        let digits = |group: &str| group.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_whole = groups.iter().map(|group| group.len()).eq(UUID_GROUPS);
        if !is_whole || !groups.iter().all(|group| digits(group)) {
            return None;
        }
        let number = u128::from_str_radix(&groups.concat(), 16).ok()?;
        Some(GpuUuid(number.to_be_bytes()))
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", u128::from_be_bytes(self.0));
        let mut rest = digits.as_str();
        f.write_str("GPU")?;
        for len in UUID_GROUPS {
            let (group, after) = rest.split_at(len);
            write!(f, "-{group}")?;
            rest = after;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
