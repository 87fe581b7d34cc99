//! The architectures that kernels are compiled for.

use std::{fmt, str::FromStr};

/// An architecture as NVRTC names it: `sm_80`, `sm_90a`. A cubin runs on devices of its architecture and, unless that
/// is one of the `a` kind, on later ones of the same major part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    number: u16,
    specific: bool,
}

/// A text that names no architecture, or a device without the instructions that the kernels need.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArchError {
    /// Not of the form `sm_90a`.
    #[error("{0:?} names no GPU architecture; one looks like sm_80 or sm_90a")]
    Name(String),
    /// A device older than the oldest supported one.
    #[error(
        "a GPU of compute capability {major}.{minor} is too old: the kernels need 8.0 (A100) or newer, for BF16 \
         matrix instructions and asynchronous copies"
    )]
    TooOld {
        /// Major part.
        major: u32,
        /// Minor part.
        minor: u32,
    },
}

impl Arch {
    /// What every change is compiled for: A100, H100/H200, B200.
    pub const CHECKED: [Arch; 3] = [Arch::plain(80), Arch::specific(90), Arch::specific(100)];

    /// What a release embeds: besides those, GeForce 30, GeForce 40 / L4 / L40, GeForce 50 / RTX PRO.
    pub const RELEASED: [Arch; 6] = [
        Arch::plain(80),
        Arch::plain(86),
        Arch::plain(89),
        Arch::specific(90),
        Arch::specific(100),
        Arch::plain(120),
    ];

    /// Instructions that later devices of the family keep.
    const fn plain(number: u16) -> Arch {
        Arch { number, specific: false }
    }

    /// All instructions of one architecture, which no other device runs.
    const fn specific(number: u16) -> Arch {
        Arch { number, specific: true }
    }

    /// What to compile for on a device of this compute capability.
    pub fn of_device(major: u32, minor: u32) -> Result<Arch, ArchError> {
        if major < 8 {
            return Err(ArchError::TooOld { major, minor });
        }
        let number = major.checked_mul(10).and_then(|tens| tens.checked_add(minor));
        let number = number.filter(|_| minor < 10).and_then(|number| u16::try_from(number).ok());
        let number = number.ok_or_else(|| ArchError::Name(format!("{major}.{minor}")))?;
        // The data centre's Hopper and Blackwell have instructions that exist under their own name only.
        Ok(Arch { number, specific: matches!(major, 9 | 10) })
    }

    /// Whether devices of this architecture run cubins of `built`.
    pub fn runs(self, built: Arch) -> bool {
        let family = !built.specific && built.number / 10 == self.number / 10 && built.number <= self.number;
        self == built || family
    }

    /// Compute capability times ten: 80, 90, 100.
    pub fn number(self) -> u32 {
        self.number.into()
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

impl FromStr for Arch {
    type Err = ArchError;

    fn from_str(text: &str) -> Result<Arch, ArchError> {
        let refused = || ArchError::Name(text.to_owned());
        let name = text.strip_prefix("sm_").ok_or_else(refused)?;
        let (digits, specific) = name.strip_suffix('a').map_or((name, false), |digits| (digits, true));
        let well_formed = matches!(digits.len(), 2 | 3)
            && digits.bytes().all(|byte| byte.is_ascii_digit())
            && !digits.starts_with('0');
        let number: u16 = digits.parse().ok().filter(|_| well_formed).ok_or_else(refused)?;
        if number < 80 {
            return Err(ArchError::TooOld { major: u32::from(number / 10), minor: u32::from(number % 10) });
        }
        Ok(Arch { number, specific })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_written_as_it_is_read() {
        for arch in Arch::RELEASED {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!(
            Arch::RELEASED.map(|arch| arch.to_string()).join(" "),
            "sm_80 sm_86 sm_89 sm_90a sm_100a sm_120"
        );
        assert!(Arch::CHECKED.iter().all(|arch| Arch::RELEASED.contains(arch)));
    }

    #[test]
    fn other_texts_name_no_architecture() {
        for text in [
            "",
            "sm_",
            "sm_8",
            "80",
            "sm_90b",
            "sm_9a0",
            "sm_+90",
            "sm_080",
            "sm_90000",
            "compute_90",
            "SM_90",
        ] {
            assert_eq!(text.parse::<Arch>(), Err(ArchError::Name(text.to_owned())), "{text}");
        }
        assert_eq!("sm_75".parse::<Arch>(), Err(ArchError::TooOld { major: 7, minor: 5 }));
    }

    #[test]
    fn a_device_says_what_to_compile_for() {
        for (major, minor, name) in [
            (8, 0, "sm_80"),
            (8, 6, "sm_86"),
            (9, 0, "sm_90a"),
            (10, 0, "sm_100a"),
            (10, 3, "sm_103a"),
            (12, 1, "sm_121"),
        ] {
            assert_eq!(Arch::of_device(major, minor).map(|arch| arch.to_string()), Ok(name.to_owned()));
        }
        assert_eq!(Arch::of_device(7, 5), Err(ArchError::TooOld { major: 7, minor: 5 }));
        for (major, minor) in [(9, 10), (u32::MAX, 9), (9, u32::MAX), (6_553, 6)] {
            assert!(Arch::of_device(major, minor).is_err(), "{major}.{minor}");
        }
    }
}
