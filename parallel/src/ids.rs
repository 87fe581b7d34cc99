//! The small identities that every crate above shares.

use std::fmt;

/// Position of a device in its tensor-parallel group, `0..size`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, wincode::SchemaRead, wincode::SchemaWrite,
)]
pub struct Rank(pub u16);

impl Rank {
    /// The rank as an index into per-rank arrays.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// One page of the paged KV cache. The same number names the same page on every rank of a group.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, wincode::SchemaRead, wincode::SchemaWrite,
)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The page as an index into the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One page of the host's pool, where copies of pages of the KV cache are kept. The same number names the same page on
/// every rank of a group.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, wincode::SchemaRead, wincode::SchemaWrite,
)]
pub struct HostBlock(pub u32);

impl HostBlock {
    /// The page as an index into the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
