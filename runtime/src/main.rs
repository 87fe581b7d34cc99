//! The `consort` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    consort::cli::main()
}
