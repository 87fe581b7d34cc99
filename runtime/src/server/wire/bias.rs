//! `logit_bias`: an object whose names are token ids.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use super::scalar::Number;
use crate::engine::LOGIT_BIAS_MAX;

/// At most as many entries as a request may have. Of repeated ids the last one counts.
#[derive(Debug, Default)]
pub(super) struct LogitBias(pub(super) BTreeMap<u32, f32>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;

        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = BTreeMap<u32, f32>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token ids (as strings) to numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let token = name.parse().map_err(|_| {
                        let short: String = name.chars().take(40).collect();
                        A::Error::custom(format_args!("names must be token ids, got {short:?}"))
                    })?;
                    entries.insert(token, map.next_value::<Number>()?.0);
                    if entries.len() > LOGIT_BIAS_MAX {
                        return Err(A::Error::custom(format_args!(
                            "must have at most {LOGIT_BIAS_MAX} entries"
                        )));
                    }
                }
                Ok(entries)
            }
        }

        deserializer.deserialize_map(BiasVisitor).map(Self)
    }
}
