//! Whole models against `transformers`: fixtures made by `cargo xtask fixtures`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "figures for the reader of --nocapture")]

mod bits;
mod cuda;
mod groups;
mod harness;

mod smollm2;
mod software_driver;
mod sums;
mod tiny;
