//! The `consort` command as the tests launch it.

use std::process::ExitCode;

fn main() -> ExitCode {
    consort::cli::main()
}
