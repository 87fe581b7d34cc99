//! The software cuBLASLt through cudarc, against plain loops. Each test runs in a process of its own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod algorithms;
mod harness;
mod matrix;
mod products;
mod refusals;
mod streams;
