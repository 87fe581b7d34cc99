//! Where each value of a topology came from.

use std::collections::BTreeMap;

use super::{error::Violations, excerpt::Place, raw::RawTopology, schema::KEYS};

/// Places of the values that somebody gave, by key.
#[derive(Clone, Default)]
pub(super) struct Origins(BTreeMap<&'static str, Place>);

/// Topologies are equal if they say the same, whoever said it.
impl PartialEq for Origins {
    fn eq(&self, _: &Origins) -> bool {
        true
    }
}

impl std::fmt::Debug for Origins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(key, place)| (key, &place.name))).finish()
    }
}

impl Origins {
    pub(super) fn of(raw: &mut RawTopology, violations: &Violations) -> Origins {
        let place = |key: &'static str| Some((key, violations.place(&raw.origin(key)?)));
        Origins(KEYS.iter().map(|key| key.name).filter_map(place).collect())
    }

    /// Where a key's value was given; nowhere if it is a default.
    pub(super) fn of_key(&self, key: &str) -> Option<&Place> {
        self.0.get(key)
    }
}
