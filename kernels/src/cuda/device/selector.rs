//! Which device a user means.

use std::{fmt, str::FromStr};

/// Identity of a device, the same in every process and after every start of the machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

/// A device by number or by identity: `cuda:0`, `cuda:GPU-8f6d0f0e-...`, of which a beginning is enough.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The number that CUDA gives it in this process, after `CUDA_VISIBLE_DEVICES`.
    Ordinal(u32),
    /// A beginning of its UUID, in lower case, as far as it is given: at least one digit.
    Uuid(String),
}

/// A text that selects no device.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} names no CUDA device; one looks like cuda:0 or cuda:GPU-8f6d0f0e (a UUID or its beginning)")]
pub struct SelectorError(String);

/// Before the digits of a UUID.
const UUID_PREFIX: &str = "GPU-";
/// Characters of a UUID, without the prefix.
const UUID_CHARACTERS: usize = 36;

impl Selector {
    /// Whether a device is meant.
    pub fn matches(&self, ordinal: u32, uuid: Uuid) -> bool {
        match self {
            Selector::Ordinal(wanted) => *wanted == ordinal,
            Selector::Uuid(beginning) => uuid.digits().starts_with(beginning),
        }
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Selector, SelectorError> {
        let refused = || SelectorError(text.to_owned());
        let name = text.strip_prefix("cuda:").ok_or_else(refused)?;
        if let Some(digits) = name.strip_prefix(UUID_PREFIX) {
            let well_formed = (1..=UUID_CHARACTERS).contains(&digits.len())
                && digits.bytes().enumerate().all(|(at, byte)| match at {
                    8 | 13 | 18 | 23 => byte == b'-',
                    _ => byte.is_ascii_hexdigit(),
                });
            return if well_formed {
                Ok(Selector::Uuid(digits.to_ascii_lowercase()))
            } else {
                Err(refused())
            };
        }
        let number =
            name.bytes().all(|byte| byte.is_ascii_digit()) && (name == "0" || !name.starts_with('0'));
        name.parse().ok().filter(|_| number).map(Selector::Ordinal).ok_or_else(refused)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Selector::Uuid(beginning) => write!(f, "cuda:{UUID_PREFIX}{beginning}"),
        }
    }
}

impl Uuid {
    /// `8f6d0f0e-0123-4567-89ab-0123456789ab`.
    fn digits(self) -> String {
        let mut text = String::with_capacity(UUID_CHARACTERS);
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{UUID_PREFIX}{}", self.digits())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Uuid =
        Uuid([0x8f, 0x6d, 0x0f, 0x0e, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0, 1, 2, 3]);

    #[test]
    fn a_selector_is_written_as_it_is_read() {
        for text in ["cuda:0", "cuda:15", "cuda:GPU-8", "cuda:GPU-8f6d0f0e-0123-4567-89ab-cdef00010203"] {
            assert_eq!(text.parse::<Selector>().map(|selector| selector.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn a_beginning_of_a_uuid_in_any_case_selects_its_device() {
        assert_eq!(UUID.to_string(), "GPU-8f6d0f0e-0123-4567-89ab-cdef00010203");
        for text in [
            "cuda:3",
            "cuda:GPU-8F6D",
            "cuda:GPU-8f6d0f0e-01",
            "cuda:GPU-8f6d0f0e-0123-4567-89ab-cdef00010203",
        ] {
            assert!(text.parse::<Selector>().unwrap().matches(3, UUID), "{text}");
        }
        for text in ["cuda:0", "cuda:GPU-9", "cuda:GPU-8f6d0f0e-02"] {
            assert!(!text.parse::<Selector>().unwrap().matches(3, UUID), "{text}");
        }
    }

    #[test]
    fn other_texts_select_no_device() {
        for text in [
            "",
            "cpu",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:01",
            "cuda:4294967296",
            "cuda:GPU-",
            "cuda:GPU-8f6d0f0e01",
            "cuda:GPU-xyz",
            "cuda:GPU-8f6d0f0e-0123-4567-89ab-cdef000102034",
            "CUDA:0",
        ] {
            assert_eq!(text.parse::<Selector>(), Err(SelectorError(text.to_owned())), "{text}");
        }
    }
}
