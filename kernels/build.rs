//! Embeds prebuilt cubins, where `CONSORT_CUBINS_DIR` names a folder that `cargo xtask cubins` wrote; without it the
//! table is empty and kernels are compiled on the machine that needs them.

#[allow(dead_code, unreachable_pub, reason = "the crate itself uses the rest")]
#[path = "src/cuda/cubins/manifest.rs"]
mod manifest;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use manifest::{Manifest, ManifestError};

const VARIABLE: &str = "CONSORT_CUBINS_DIR";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/cuda/cubins/manifest.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let (Some(crate_folder), Some(out)) = (env::var_os("CARGO_MANIFEST_DIR"), env::var_os("OUT_DIR")) else {
        println!("cargo::error=this build script is run by cargo");
        return ExitCode::FAILURE;
    };
    let crate_folder = PathBuf::from(crate_folder);
    let table = match env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        // A relative path starts at the workspace's root, where cargo is usually called.
        Some(folder) => embed(&crate_folder, &crate_folder.join("..").join(folder)),
        None => Ok(Manifest::default().table(Path::new(""))),
    };
    let path = Path::new(&out).join("embedded_cubins.rs");
    let written = table.map_err(|error| format!("{VARIABLE}: {error}")).and_then(|table| {
        fs::write(&path, table).map_err(|error| format!("cannot write {}: {error}", path.display()))
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

fn embed(crate_folder: &Path, folder: &Path) -> Result<String, ManifestError> {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-changed=src");
    let manifest = Manifest::read(&folder)?;
    manifest.check(&folder, &manifest::digests(&crate_folder.join("src"))?)?;
    Ok(manifest.table(&folder))
}
