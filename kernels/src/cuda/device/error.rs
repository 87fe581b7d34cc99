//! What may go wrong with a device.

use std::fmt::Write;

/// Why a device cannot be used, or did not do what it was asked for.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CudaError {
    /// No driver.
    #[error(
        "no CUDA driver on this machine, so it has no CUDA device. Looked at:{looked}\nInstall NVIDIA's driver, or \
         use device = \"cpu\"; CONSORT_CUDA_LIB_PATH, if set, must name the folder of libcuda.so.1 or the file"
    )]
    NoDriver {
        /// One line for each place, each after a line's end, with what was wrong there.
        looked: String,
    },
    /// A driver that lacks what is needed.
    #[error(
        "the CUDA driver {file} is too old: {reason}. Install a driver for CUDA 12.0 (525.60) or newer",
        file = file.display()
    )]
    DriverTooOld {
        /// Its library.
        file: std::path::PathBuf,
        /// What it lacks.
        reason: String,
    },
    /// No device, or not the one that was asked for.
    #[error("no CUDA device {wanted}: {reason}")]
    NoDevice {
        /// What was asked for.
        wanted: String,
        /// Which devices there are, or why there are none.
        reason: String,
    },
    /// A device without the instructions that the kernels need.
    #[error("cuda:{ordinal} ({name}): {reason}")]
    TooOld {
        /// The device.
        ordinal: u32,
        /// Its name.
        name: String,
        /// What it lacks.
        reason: String,
    },
    /// Memory that a device, or the host for it, does not have.
    #[error("out of memory on {device} to {doing}{}{}{}", asked(*wanted), left(*free), listed(parts))]
    OutOfMemory {
        /// The device.
        device: String,
        /// What for.
        doing: String,
        /// Bytes asked for; `None` where the driver asked for them itself.
        wanted: Option<u64>,
        /// Bytes of device memory that were free; `None` where the driver does not say.
        free: Option<u64>,
        /// What the bytes were for, the largest parts first, and their bytes.
        parts: Vec<(String, u64)>,
    },
    /// A call that failed.
    #[error("{device}: could not {doing}: {function} says {name} ({code})")]
    Call {
        /// The device.
        device: String,
        /// What the call was for.
        doing: String,
        /// The function.
        function: &'static str,
        /// The driver's or the library's word for it.
        name: String,
        /// Its number.
        code: u32,
    },
    /// An error after which a device takes no more work from this process: it failed now or earlier.
    #[error(
        "{device} is lost to this process: {function} said {name} ({code}) when asked to {doing}. What was enqueued \
         before may be to blame; start the process again to use the device"
    )]
    Lost {
        /// The device.
        device: String,
        /// What the call was for that showed it.
        doing: String,
        /// The function.
        function: &'static str,
        /// The driver's word for it.
        name: String,
        /// Its number.
        code: u32,
    },
    /// Work that did not end in time.
    #[error("{device} did not {doing} within {seconds} s: a kernel hangs or waits for a peer that is gone")]
    Timeout {
        /// The device.
        device: String,
        /// What was waited for.
        doing: String,
        /// How long, rounded up.
        seconds: u64,
    },
    /// Memory of a device that other processes cannot be given.
    #[error(
        "{device} cannot share memory with ranks in other processes: {reason}; use isolation = \"thread\", with which \
         all ranks are in one"
    )]
    Unshared {
        /// The device.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// Kernels that cannot be had for a device.
    #[error("{device}: no kernels of {text}: {reason}")]
    Kernels {
        /// The device.
        device: String,
        /// The CUDA text.
        text: String,
        /// What the compiler or the reader of cubins says.
        reason: String,
    },
    /// A call that would break a rule of this module.
    #[error("{device}: {reason}")]
    Misuse {
        /// The device.
        device: String,
        /// Which rule, and what was asked for.
        reason: String,
    },
}

impl CudaError {
    /// Whether the device takes no more work from this process.
    pub fn is_lost(&self) -> bool {
        matches!(self, CudaError::Lost { .. })
    }
}

/// Parts that are named at most.
const PARTS_SHOWN: usize = 5;

fn asked(wanted: Option<u64>) -> String {
    wanted.map_or_else(String::new, |wanted| format!(": {} wanted", shown(wanted)))
}

fn left(free: Option<u64>) -> String {
    free.map_or_else(String::new, |free| format!(", {} free", shown(free)))
}

fn listed(parts: &[(String, u64)]) -> String {
    let mut text = String::new();
    for (index, (what, bytes)) in parts.iter().take(PARTS_SHOWN).enumerate() {
        let before = if index == 0 { ". The largest parts:" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(text, "{before} {what} {}", shown(*bytes));
    }
    text
}

/// Bytes as they are, and in GiB or MiB where they are many.
fn shown(bytes: u64) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let mib = bytes as f64 / MIB;
    match mib {
        0.0..1.0 => format!("{bytes} bytes"),
        1.0..1024.0 => format!("{bytes} bytes ({mib:.1} MiB)"),
        _ => format!("{bytes} bytes ({:.2} GiB)", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_names_wanted_and_free_bytes_and_the_largest_parts() {
        let error = CudaError::OutOfMemory {
            device: "cuda:0".into(),
            doing: "allocate the memory of a shard".into(),
            wanted: Some(3 << 30),
            free: Some(5 << 20),
            parts: (0..7).map(|part| (format!("part {part}"), 700 - part)).collect(),
        };
        assert_eq!(
            error.to_string(),
            "out of memory on cuda:0 to allocate the memory of a shard: 3221225472 bytes (3.00 GiB) wanted, 5242880 \
             bytes (5.0 MiB) free. The largest parts: part 0 700 bytes, part 1 699 bytes, part 2 698 bytes, part 3 697 \
             bytes, part 4 696 bytes"
        );
    }

    #[test]
    fn an_error_fits_in_a_result_without_a_box() {
        assert!(size_of::<CudaError>() <= 112, "{}", size_of::<CudaError>());
    }
}
