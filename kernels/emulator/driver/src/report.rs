//! What the driver tells when its process ends.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use thiserror::Error;

/// One process's use of the driver.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// How many mistakes were found that a real device might not notice.
    pub violations: u64,
    /// What they are.
    pub messages: Vec<String>,
    /// Errors of kernels and copies.
    pub faults: Vec<String>,
    /// Memory of each device.
    pub devices: Vec<DeviceReport>,
    /// Pinned memory of the host that was not given back.
    pub pinned_bytes: u64,
    /// Pinned memory of the host that went with its context.
    pub pinned_left_in_contexts: u64,
    /// Kernels launched, other than by graphs.
    pub launches: u64,
    /// Graphs launched.
    pub graph_launches: u64,
    /// Those among them that were launched before their last launch had ended.
    pub graphs_behind: u64,
    /// Calls of each function.
    pub calls: BTreeMap<String, u64>,
}

/// Memory of one device, in bytes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DeviceReport {
    /// In use at the end.
    pub bytes: u64,
    /// In use at most.
    pub bytes_max: u64,
    /// Not freed by the program, but only with its context.
    pub left_in_contexts: u64,
}

/// Why there is no report.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReportError {
    /// There is no such file: the process called no function of the driver, or did not end in order.
    #[error("the software driver left no report in {}", .path.display())]
    Unreadable {
        /// Of the report.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not what this version writes.
    #[error("{} is no report of the software driver", .path.display())]
    Malformed {
        /// Of the report.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl Report {
    /// Reads the file that `CONSORT_SOFTWARE_DRIVER_REPORT` named.
    pub fn read(path: &Path) -> Result<Report, ReportError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ReportError::Unreadable { path: path.to_owned(), source })?;
        serde_json::from_str(&text).map_err(|source| ReportError::Malformed { path: path.to_owned(), source })
    }

    /// Bytes of devices and of pinned memory that the program did not free.
    pub fn leaked_bytes(&self) -> u64 {
        self.pinned_bytes
            + self.pinned_left_in_contexts
            + self.devices.iter().map(|device| device.bytes + device.left_in_contexts).sum::<u64>()
    }
}
