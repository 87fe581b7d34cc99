//! The software driver, used through cudarc as Consort uses it. Every test runs in a process of its own.

mod faults;
mod graphs;
mod kernels;
mod memory;
mod mistakes;
mod order;
mod sharing;
mod support;
