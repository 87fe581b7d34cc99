//! Cubins that were built in, see `build.rs`.

/// One of them.
pub(super) struct Embedded {
    pub(super) source: &'static str,
    pub(super) arch: &'static str,
    /// [`super::manifest::digest`] of the text that it was made from.
    pub(super) digest: &'static str,
    pub(super) bytes: &'static [u8],
}

pub(super) const EMBEDDED: &[Embedded] = include!(concat!(env!("OUT_DIR"), "/embedded_cubins.rs"));
