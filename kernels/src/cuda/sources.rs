//! Every CUDA text of the crate, built in.
//!
//! `cargo xtask cubins` compiles all of them; at run time they are what [`super::cubins`] compiles where no prebuilt
//! cubin is at hand. A test holds the list against the folders.

/// One CUDA text, which starts with `#include "prelude.cuh"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Path below the crate's `src`, which compiler messages show: `linear/kernel.cu`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
}

/// The header of every text: types, the `KERNEL` macro, all inline PTX.
pub const PRELUDE: &str = include_str!("prelude.cuh");

macro_rules! sources {
    ($($name:literal,)*) => {
        /// Every text, in the order of their names.
        pub const SOURCES: &[Source] = &[
            $(Source { name: $name, text: include_str!(concat!("../", $name)) },)*
        ];
    };
}

// One line for each text, in alphabetical order: `"linear/kernel.cu",`.
sources! {
    "embedding/kernel.cu",
    "kv_copy/kernel.cu",
    "qkv/kernel.cu",
    "rms_norm/kernel.cu",
    "rope/kernel.cu",
    "swiglu/kernel.cu",
}

impl Source {
    /// The text of this name.
    pub fn named(name: &str) -> Option<Source> {
        SOURCES.iter().copied().find(|source| source.name == name)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cuda::cubins::manifest;

    #[test]
    fn every_cuda_text_in_the_folders_is_listed_once_and_in_order() {
        let found = manifest::texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
        let found: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        let listed: Vec<&str> = SOURCES.iter().map(|source| source.name).collect();
        assert_eq!(listed, found, "kernels/src/cuda/sources.rs and the folders differ");
    }

    #[test]
    fn every_text_includes_the_prelude_and_nothing_else() {
        for source in SOURCES {
            let includes: Vec<&str> =
                source.text.lines().filter(|line| line.trim_start().starts_with("#include")).collect();
            assert_eq!(includes, ["#include \"prelude.cuh\""], "{}", source.name);
        }
    }
}
