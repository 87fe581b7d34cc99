//! Amounts of memory with units.

use super::{excerpt::shown, raw::RawBytes};

/// Longest first, so that `KiB` is not read as `B`.
const UNITS: [(&str, u64); 13] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("B", 1),
];

/// Bytes of an amount; the error says what is wrong with it.
pub(super) fn bytes(amount: &RawBytes) -> Result<u64, String> {
    match amount {
        RawBytes::Count(count) => u64::try_from(*count).map_err(|_| format!("{count} is negative")),
        RawBytes::Text(text) => {
            bytes_of_text(text.trim()).ok_or_else(|| format!("\"{}\" is no amount of memory", shown(text)))
        }
    }
}

/// Bytes of an amount as people write it: `5GB`, `512 MiB`, `1.5G`, or a number of bytes.
pub(crate) fn bytes_of_text(text: &str) -> Option<u64> {
    let (number, unit) =
        UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes))).unwrap_or((text, 1));
    let number = number.trim_end();
    // Neither a sign nor `inf` nor an exponent: f64's own parser takes those.
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b'_')
    {
        return None;
    }
    let number = number.replace('_', "");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let bytes = number.parse::<f64>().ok()? * unit as f64;
    (bytes < u64::MAX as f64).then_some(bytes as u64)
}
