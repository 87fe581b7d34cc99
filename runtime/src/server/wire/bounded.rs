//! Arrays that are refused while they are read, before memory for an absurd number of entries is taken.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

/// An array of at most `MAX` entries.
#[derive(Debug)]
pub(super) struct Bounded<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MAX: usize> IntoIterator for Bounded<T, MAX> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoundedVisitor<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedVisitor<T, MAX> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an array of at most {MAX} entries")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<T>, A::Error> {
                collect(seq, MAX)
            }
        }

        deserializer.deserialize_seq(BoundedVisitor::<T, MAX>(PhantomData)).map(Self)
    }
}

/// All entries, if there are at most `max`.
pub(super) fn collect<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    mut seq: A,
    max: usize,
) -> Result<Vec<T>, A::Error> {
    let mut entries = Vec::new();
    while let Some(entry) = seq.next_element()? {
        if entries.len() == max {
            return Err(A::Error::custom(format_args!("must have at most {max} entries")));
        }
        entries.push(entry);
    }
    Ok(entries)
}
