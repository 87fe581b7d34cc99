//! Every CUDA text of the crate, built in.
//!
//! `cargo xtask cubins` compiles all of them; at run time they are what [`super::cubins`] compiles where no prebuilt
//! cubin is at hand. A test holds the list against the folders.

use super::cubins::manifest;

/// One CUDA text, which starts with `#include "prelude.cuh"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Path below the crate's `src`, which compiler messages show: `linear/kernel.cu`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// All headers of its folder, in order of names. Each is included by its file name.
    pub headers: &'static [Header],
}

/// A header that the texts of one folder share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Path below the crate's `src`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
}

/// The header of every text: types, the `KERNEL` macro, all inline PTX.
pub const PRELUDE: &str = include_str!("prelude.cuh");

macro_rules! sources {
    ($($name:literal $([$($header:literal),*])?,)*) => {
        /// Every text, in the order of their names.
        pub const SOURCES: &[Source] = &[
            $(Source {
                name: $name,
                text: include_str!(concat!("../", $name)),
                headers: &[$($(Header { name: $header, text: include_str!(concat!("../", $header)) }),*)?],
            },)*
        ];
    };
}

// One line for each text, in alphabetical order, followed by the headers of its folder where there are some:
// `"linear/kernel.cu",` or `"op/kernel.cu" ["op/shared.cuh"],`.
sources! {
    "all_reduce/kernel.cu",
    "attention/decode.cu" ["attention/attention.cuh"],
    "attention/prefill.cu" ["attention/attention.cuh"],
    "embedding/kernel.cu",
    "kv_copy/kernel.cu",
    "linear/gemm.cu",
    "linear/gemv.cu",
    "qkv/kernel.cu",
    "rms_norm/kernel.cu",
    "rope/kernel.cu",
    "sampling/draw.cu" ["sampling/sampling.cuh", "sampling/selection.cuh"],
    "sampling/merge.cu" ["sampling/sampling.cuh", "sampling/selection.cuh"],
    "sampling/select.cu" ["sampling/sampling.cuh", "sampling/selection.cuh"],
    "sampling/summarize.cu" ["sampling/sampling.cuh", "sampling/selection.cuh"],
    "sampling/survey.cu" ["sampling/sampling.cuh", "sampling/selection.cuh"],
    "swiglu/kernel.cu",
}

impl Source {
    /// Digest of all that its cubins depend on, besides the compiler and the architecture.
    pub fn digest(&self) -> String {
        let headers = self.headers.iter().map(|header| header.text);
        manifest::digest(std::iter::once(PRELUDE).chain(headers).chain([self.text]))
    }

    /// The text of this name.
    pub fn named(name: &str) -> Option<Source> {
        SOURCES.iter().copied().find(|source| source.name == name)
    }
}

impl Header {
    /// What a text includes it by.
    pub fn file_name(&self) -> &'static str {
        self.name.rsplit('/').next().unwrap_or(self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_cuda_text_in_the_folders_is_listed_once_and_in_order() {
        let found = manifest::texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
        let found: Vec<(&str, Vec<&str>)> = found
            .iter()
            .map(|text| (text.name.as_str(), text.headers.iter().map(|(name, _)| name.as_str()).collect()))
            .collect();
        let names = |source: &Source| source.headers.iter().map(|header| header.name).collect();
        let listed: Vec<(&str, Vec<&str>)> =
            SOURCES.iter().map(|source| (source.name, names(source))).collect();
        assert_eq!(listed, found, "kernels/src/cuda/sources.rs and the folders differ");
    }

    #[test]
    fn every_text_includes_the_prelude_and_headers_of_its_folder_alone() {
        for source in SOURCES {
            let allowed: Vec<String> = std::iter::once("prelude.cuh")
                .chain(source.headers.iter().map(|header| header.file_name()))
                .map(|name| format!("#include \"{name}\""))
                .collect();
            let texts = std::iter::once(source.text).chain(source.headers.iter().map(|header| header.text));
            for line in texts.flat_map(str::lines).filter(|line| line.trim_start().starts_with("#include")) {
                assert!(allowed.iter().any(|allowed| allowed == line), "{}: {line}", source.name);
            }
            assert!(source.text.contains(&allowed[0]), "{}: no prelude", source.name);
        }
    }
}
