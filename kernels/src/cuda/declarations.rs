//! What a CUDA text declares of its kernels, beside the code: launch bounds and dynamic shared memory.
//!
//! `KERNEL(name, threads, blocks, ..)` says how many blocks shall fit on a multiprocessor. How much dynamic shared
//! memory they take is decided at launch, so the text says the most that the host asks for, in a comment of its own:
//!
//! ```text
//! // dynamic shared memory: linear_gemm_128x128 81920 bytes
//! // dynamic shared memory: attention_decode_* 36864 bytes
//! ```
//!
//! A name may end in `*`; the first line that fits a kernel counts. `cargo xtask cubins` computes occupancy from it and
//! fails where the promised blocks do not fit, or where a line names no kernel.

use super::sources::Source;

const COMMENT: &str = "// dynamic shared memory:";

/// `KERNEL(..)` with numbers in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds<'a> {
    /// The kernel.
    pub kernel: &'a str,
    /// Most threads of a block.
    pub threads: u32,
    /// Blocks that shall fit on a multiprocessor.
    pub blocks: u32,
}

/// A comment on dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DynamicShared<'a> {
    /// A kernel's name, or the beginning of several followed by `*`.
    pub kernels: &'a str,
    /// The most bytes a block is launched with.
    pub bytes: u32,
}

/// A comment that begins like one on dynamic shared memory and goes on otherwise.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{source_name}:{line}: write `{COMMENT} KERNEL BYTES bytes`, where KERNEL may end in `*`")]
pub struct DeclarationError {
    /// The text.
    pub source_name: String,
    /// Line, from 1.
    pub line: usize,
}

impl Source {
    /// Launch bounds that are written in numbers; macros and constants are the compiler's business.
    pub fn bounds(&self) -> impl Iterator<Item = Bounds<'static>> + use<> {
        self.text.lines().filter_map(|line| {
            let mut arguments = line.trim_start().strip_prefix("KERNEL(")?.splitn(4, ',').map(str::trim);
            let kernel = arguments.next().filter(|name| is_name(name))?;
            let threads = arguments.next()?.parse().ok()?;
            let blocks = arguments.next()?.parse().ok()?;
            Some(Bounds { kernel, threads, blocks })
        })
    }

    /// The comments on dynamic shared memory, in order.
    pub fn dynamic_shared(&self) -> Result<Vec<DynamicShared<'static>>, DeclarationError> {
        let mut found = Vec::new();
        for (index, line) in self.text.lines().enumerate() {
            let Some(said) = line.trim_start().strip_prefix(COMMENT) else { continue };
            let words: Vec<&'static str> = said.split_whitespace().collect();
            let declared = match words.as_slice() {
                [kernels, bytes, "bytes"] if is_name(kernels.strip_suffix('*').unwrap_or(kernels)) => {
                    bytes.parse().ok().map(|bytes| DynamicShared { kernels, bytes })
                }
                _ => None,
            };
            let refused = || DeclarationError { source_name: self.name.to_owned(), line: index + 1 };
            found.push(declared.ok_or_else(refused)?);
        }
        Ok(found)
    }

    /// The most dynamic shared memory that a block of `kernel` is launched with; 0 where the text does not say.
    pub fn dynamic_shared_bytes(&self, kernel: &str) -> Result<u32, DeclarationError> {
        let declared = self.dynamic_shared()?;
        Ok(declared.iter().find(|declared| declared.fits(kernel)).map_or(0, |declared| declared.bytes))
    }
}

impl DynamicShared<'_> {
    /// Whether this is about `kernel`.
    pub fn fits(&self, kernel: &str) -> bool {
        fits(self.kernels, kernel)
    }
}

/// Whether a kernel's name is `pattern`, or begins with what stands before its `*`.
pub fn fits(pattern: &str, kernel: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == kernel, |beginning| kernel.starts_with(beginning))
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &'static str) -> Source {
        Source { name: "op/kernel.cu", text, headers: &[] }
    }

    #[test]
    fn bounds_in_numbers_are_read_and_others_are_left_to_the_compiler() {
        let text = "KERNEL(a, 256, 2, (int n)) {\n}\n  KERNEL(b_8, 64,1,(float* x, int n)) {}\n\
                    #define DECODE(head) \\\n    KERNEL(decode_##head, 128, 2, (int n)) \\\n\
                    KERNEL(c, THREADS, 2, ()) {}\n// KERNEL(d, 32, 1, ()) {}\n";
        let found: Vec<Bounds<'_>> = source(text).bounds().collect();
        let bounds = |kernel, threads, blocks| Bounds { kernel, threads, blocks };
        assert_eq!(found, [bounds("a", 256, 2), bounds("b_8", 64, 1)]);
    }

    #[test]
    fn the_first_line_that_fits_a_kernel_tells_its_dynamic_shared_memory() {
        let text = "// dynamic shared memory: gemm_wide 81920 bytes\n    // dynamic shared memory: gemm_* 4096 bytes\n";
        let bytes = |kernel| source(text).dynamic_shared_bytes(kernel);
        assert_eq!((bytes("gemm_wide"), bytes("gemm_narrow"), bytes("gemv")), (Ok(81_920), Ok(4_096), Ok(0)));
    }

    #[test]
    fn a_line_that_says_no_bytes_is_refused_with_its_place() {
        for text in [
            "\n// dynamic shared memory: 4096 bytes",
            "\n// dynamic shared memory: a 4 KiB",
            "\n// dynamic shared memory: a -1 bytes",
            "\n// dynamic shared memory: a 99999999999 bytes",
            "\n// dynamic shared memory: *a 1 bytes",
            "\n// dynamic shared memory:",
        ] {
            let error = source(text).dynamic_shared().expect_err(text).to_string();
            assert!(error.starts_with("op/kernel.cu:2: write"), "{error}");
        }
    }
}
