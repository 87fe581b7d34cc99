//! Names of cached blocks: a chain of hashes over salt and tokens.
//!
//! Two blocks have one key when they hold the same tokens after the same tokens under the same salt, and then, the
//! model being the same, the same keys and values. Requests with different salts share nothing, so that nobody can find
//! out by the time of an answer what others have asked.

use std::fmt;

/// Told apart in the first link, so that no salt is taken for another's tokens.
const UNSALTED: &[u8] = b"consort prefix cache";
const SALTED: &[u8] = b"consort prefix cache of a salt";

/// What separates one user's cached prefixes from another's. Only its hash is kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheSalt([u8; 32]);

impl CacheSalt {
    /// The salt made of `secret`, of any length.
    pub fn new(secret: &[u8]) -> Self {
        Self(*blake3::hash(secret).as_bytes())
    }

    /// Both together: equal only when both parts are.
    pub fn and(self, other: CacheSalt) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0).update(&other.0);
        Self(*hasher.finalize().as_bytes())
    }
}

/// Says nothing of its content: salts are made of secrets.
impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheSalt(..)")
    }
}

/// Name of the content of a full block: its tokens, all tokens before them, and the salt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    /// What comes before the first block of every sequence with this salt.
    pub fn root(salt: Option<CacheSalt>) -> Self {
        let mut hasher = blake3::Hasher::new();
        match salt {
            None => hasher.update(UNSALTED),
            Some(salt) => hasher.update(SALTED).update(&salt.0),
        };
        Self(*hasher.finalize().as_bytes())
    }

    /// The key of the block that holds `tokens` after this one.
    pub fn next(&self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for part in tokens.chunks(16) {
            let mut bytes = [0; 64];
            for (to, token) in bytes.chunks_exact_mut(4).zip(part) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * part.len()]);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Keys of all full blocks of `tokens`, in order.
    pub fn chain(salt: Option<CacheSalt>, tokens: &[u32], block_size: usize) -> Vec<Self> {
        let mut parent = Self::root(salt);
        let full = tokens.chunks_exact(block_size);
        full.map(|block| {
            parent = parent.next(block);
            parent
        })
        .collect()
    }

    /// The hash itself.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "BlockKey({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_key_names_salt_position_and_every_token_before() {
        let tokens: Vec<u32> = (0..64).collect();
        let plain = BlockKey::chain(None, &tokens, 16);
        assert_eq!(plain.len(), 4);
        assert_eq!(BlockKey::chain(None, &tokens[..63], 16), plain[..3]);
        let mut changed = tokens.clone();
        changed[17] = 99;
        let changed = BlockKey::chain(None, &changed, 16);
        assert_eq!(changed[0], plain[0]);
        assert!((1..4).all(|at| changed[at] != plain[at]));
        let repeated = BlockKey::chain(None, &[7; 64], 16);
        let (one, two) = (CacheSalt::new(b"one"), CacheSalt::new(b"two"));
        let salts = [None, Some(one), Some(two), Some(one.and(two)), Some(two.and(one))];
        let salted = salts.into_iter().flat_map(|salt| BlockKey::chain(salt, &tokens, 16));
        let all: BTreeSet<BlockKey> = salted.chain(repeated).chain(changed).collect();
        assert_eq!(all.len(), 5 * 4 + 4 + 3, "keys of different content are equal");
    }

    #[test]
    fn block_sizes_other_than_a_chunk_are_hashed_whole() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut other = tokens.clone();
        other[39] = 0;
        assert_ne!(BlockKey::root(None).next(&tokens), BlockKey::root(None).next(&other));
        assert_eq!(BlockKey::chain(None, &tokens, 5).len(), 8);
    }

    #[test]
    fn a_salt_is_not_printed() {
        assert_eq!(format!("{:?}", CacheSalt::new(b"a key")), "CacheSalt(..)");
    }
}
