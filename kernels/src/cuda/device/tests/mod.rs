//! Devices of the software driver, in processes of their own.

mod faults;
mod graphs;
mod landing;
mod memory;
mod offload;
mod opening;
mod operations;
mod products;
mod sharing;
mod uploads;

use std::{env, sync::Arc, time::Duration};

use consort_software_driver::{Report, in_child};

use super::*;
use crate::{
    KernelError,
    cuda::{row_stride, settings::Settings},
    element::bf16,
    testing::{Folder, Numbers},
};

/// Enough for any work here, on a machine that does other things, too.
const LIMIT: Duration = Duration::from_secs(120);

/// Orders in which the driver may do what is enqueued.
const ORDERS: [&str; 4] = ["lazy", "eager", "random:1", "random:2"];

/// Runs `body` over the software driver with a variable or more of its own, and holds its report to this: nothing was
/// done in a wrong order, and everything was given back.
fn over_driver(module: &str, test: &str, variables: &[(&str, &str)], body: impl FnOnce(&Settings)) {
    if let Some(report) = report_of(module, test, variables, body) {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
    }
}

/// The same without holding it to anything; the report exists in the parent process only.
fn report_of(
    module: &str,
    test: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&Settings),
) -> Option<Report> {
    let module = module.split_once("::").map_or(module, |(_, module)| module);
    let test = format!("{module}::{test}");
    if is_child() {
        in_child(&test, &[], || body(&Settings::of_process()));
        return None;
    }
    let folder = Folder::new(&test.replace("::", "-"));
    let (report, cache) = (folder.path().join("report.json"), folder.path().join("cache"));
    let texts = [&report, &cache].map(|path| path.to_str().expect("the temporary folder has a plain name"));
    let mut environment = vec![("CONSORT_SOFTWARE_DRIVER_REPORT", texts[0]), ("CONSORT_CACHE_DIR", texts[1])];
    environment.extend(variables);
    in_child(&test, &environment, || unreachable!("this is the parent"));
    Some(Report::read(&report).expect("the child used the driver"))
}

/// All items, for a process each; a child, whose environment is of one of them, takes one turn.
fn each<T>(items: &[T]) -> &[T] {
    if is_child() { &items[..1] } else { items }
}

fn is_child() -> bool {
    env::var_os("CONSORT_SOFTWARE_DRIVER_CHILD").is_some()
}

/// `body` in each order of work.
fn in_every_order(module: &str, test: &str, variables: &[(&str, &str)], body: impl Fn(&Settings)) {
    for order in each(&ORDERS) {
        let mut variables = variables.to_vec();
        variables.push(("CONSORT_SOFTWARE_DRIVER_ORDER", *order));
        over_driver(module, test, &variables, &body);
    }
}

fn open(settings: &Settings, selector: &str) -> Arc<CudaDevice> {
    let selector = selector.parse().expect("a test selects a device");
    CudaDevice::open(&selector, settings).unwrap_or_else(|error| panic!("{error}"))
}

/// What a buffer holds.
fn read<T: crate::buffer::Plain + Default>(device: &CudaDevice, buffer: &DeviceBuffer<T>) -> Vec<T> {
    let mut values = vec![T::default(); buffer.len()];
    device.download(buffer.all(), &mut values, LIMIT).expect("the device works");
    values
}
