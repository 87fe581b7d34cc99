//! Which instruction sets there are, and which of them this machine has.

use std::{fmt, str::FromStr};

/// Instruction sets of the CPU kernels, slowest first. All of them compute the same bits of every
/// number (of what is not a number, only that it is none).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, wincode::SchemaRead, wincode::SchemaWrite,
)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512F and BW.
    Avx512,
    /// AVX-512, and AMX tiles for products of BF16 matrices.
    Amx,
}

/// A name that is no instruction set's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no instruction set; there are {}", known())]
pub struct UnknownIsa {
    /// What was given.
    pub name: String,
}

fn known() -> String {
    Isa::ALL.map(Isa::name).join(", ")
}

impl Isa {
    /// All, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The best one of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Those that this machine has, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this machine has it, and the system lets this process use it.
    ///
    /// Asking for [`Isa::Amx`] asks Linux for the permission to use tiles, which is given to the whole process and for
    /// good: signal frames then have room for 8 KiB of tiles, and an alternate signal stack made by hand needs it too.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.is_available() && super::amx::is_permitted(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => false,
        }
    }

    /// Its name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Isa, UnknownIsa> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| UnknownIsa { name: name.to_owned() })
    }
}
