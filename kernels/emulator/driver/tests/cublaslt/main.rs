//! The software cuBLASLt through cudarc, against plain loops. Each test runs in a process of its own.

mod algorithms;
mod harness;
mod matrix;
mod products;
mod refusals;
mod streams;
