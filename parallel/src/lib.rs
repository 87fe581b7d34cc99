//! One model over several ranks: who holds what, how partial results are exchanged, and what a rank executes.
//!
//! | module | what it is |
//! |---|---|
//! | [`ids`] | `Rank`, `BlockId` |
//! | [`config`] | what a checkpoint says about its model |
//! | [`checkpoint`] | safetensors folders and GGUF files, mapped and read by slices |
//! | [`partition`] | the share of heads, columns and vocabulary of each rank: computed once, asked by everything |
//! | [`collective`] | sums and exchanges in one fixed order |
//! | [`kv`] | one rank's pages of keys and values |
//! | [`batch`], [`model`] | one step's work, and the models that execute it |
//! | [`plan`] | whether a model fits, for how many users, and how fast it could be |
//!
//! Absent on purpose: actors, scheduling, text. A model runs when its caller says so, on the caller's thread.

pub mod batch;
pub mod checkpoint;
pub mod collective;
pub mod config;
pub mod ids;
pub mod kv;
pub mod model;
pub mod partition;
pub mod plan;
