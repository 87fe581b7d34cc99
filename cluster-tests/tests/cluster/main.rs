//! Consort as people use it: real processes, real sockets, real clients, a real model.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(
    clippy::await_holding_lock,
    reason = "the lock keeps whole tests apart, and each has its own runtime"
)]
#![allow(clippy::print_stdout, reason = "figures for the reader of --nocapture")]

mod async_openai_client;
mod bad_requests;
mod caching;
mod cli;
mod convert;
mod custom_supervision;
mod doctor;
mod engine;
mod harness;
mod leaks;
mod memory;
mod openai_client;
mod processes;
mod replicas;
mod server;
mod software_driver;
