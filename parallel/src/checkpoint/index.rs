//! The index of a folder with several safetensors files: which file holds which tensor.

use std::{
    collections::{BTreeMap, btree_map},
    fmt,
    path::{Component, Path},
};

use serde::{
    Deserialize,
    de::{Deserializer, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{CheckpointError, json};

/// Largest index that is read, in bytes. That of a model with a hundred thousand tensors takes 10 MB.
const INDEX_BYTES_MAX: u64 = 64 << 20;
const KEY: &str = "weight_map";

/// File names by tensor. Each is the plain name of a file in the same folder, and no tensor is listed twice.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let key = |key: String, problem: String| CheckpointError::Key { path: path.to_owned(), key, problem };
    let bytes = json::read_bytes(path, INDEX_BYTES_MAX)?;
    let index: Entries<'_> = serde_json::from_slice(&bytes)
        .map_err(|source| CheckpointError::Json { path: path.to_owned(), source })?;
    let mut maps = index.0.iter().filter(|(key, _)| key == KEY);
    let map = maps.next().and_then(|(_, map)| serde_json::from_str::<Entries<'_>>(map.get()).ok());
    let Some(Entries(entries)) = map else {
        return Err(key(KEY.to_owned(), "must be an object of tensor names and file names".to_owned()));
    };
    if maps.next().is_some() {
        return Err(key(KEY.to_owned(), "is there twice".to_owned()));
    }
    let mut files = BTreeMap::new();
    for (name, file) in entries {
        let file: Option<String> = serde_json::from_str(file.get()).ok();
        let Some(file) = file.filter(|file| is_plain_name(file)) else {
            let problem = "must be the name of a file in the same folder".to_owned();
            return Err(key(format!("{KEY}.{name}"), problem));
        };
        match files.entry(name) {
            btree_map::Entry::Vacant(place) => drop(place.insert(file)),
            btree_map::Entry::Occupied(first) => {
                let problem = format!("is listed twice, in {} and in {file}", first.get());
                return Err(key(format!("{KEY}.{}", first.key()), problem));
            }
        }
    }
    Ok(files)
}

/// Whether a name stays inside the folder: an index must not reach other files of the machine.
fn is_plain_name(name: &str) -> bool {
    if name.contains(char::is_control) {
        return false;
    }
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}

/// An object's entries as they stand, keys perhaps repeated: a map would keep the last of them without a word. What
/// they hold is looked at later, so that a wrong type is told by its key.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Object)
    }
}
