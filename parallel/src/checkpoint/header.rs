//! The header of a safetensors file: one JSON object of names, types, shapes and places.
//!
//! Read here and not by the `safetensors` crate, whose errors do not name the tensor, which takes the last of two
//! tensors of one name without a word, adds offsets unchecked, and builds a tree of the whole header first. Only its
//! list of types is used. Memory stays within a small multiple of the header's bytes.

use std::fmt;

use safetensors::Dtype;
use serde::{
    Deserialize,
    de::{self, Deserializer, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor},
};

use super::{CheckpointError, MappedFile};

/// Bytes of the length that a safetensors file starts with.
const LENGTH_BYTES: usize = 8;
/// Longest header that is believed, in bytes; the format's own limit.
const HEADER_BYTES_MAX: usize = 100_000_000;
/// Longest name of a tensor.
const NAME_BYTES_MAX: usize = 1024;
/// Dimensions of a tensor; weights have four at most.
const DIMENSIONS_MAX: usize = 8;
/// The one key that is no tensor.
const METADATA_KEY: &str = "__metadata__";

/// A tensor as the header describes it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// From the start of the file; the constructor has held it and the size to the file's length.
    pub(super) offset: usize,
}

/// Where the data of a safetensors file starts, and its tensors in the order of the data. Names are unique, and the
/// tensors fill the data without gap or overlap.
pub(super) fn read(file: &MappedFile) -> Result<(usize, Vec<Entry>), CheckpointError> {
    let bytes = file.bytes();
    let malformed = |offset: usize, problem: String| CheckpointError::Malformed {
        path: file.path().to_owned(),
        offset,
        problem,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(malformed(0, format!("{} bytes are too short for a safetensors file", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length)
        .ok()
        .filter(|length| *length <= HEADER_BYTES_MAX)
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| {
            malformed(0, format!("its header of {length} bytes goes past the end of the file or is absurd"))
        })?;
    let Header(mut stored) = serde_json::from_slice(header)
        .map_err(|source| CheckpointError::SafetensorsHeader { path: file.path().to_owned(), source })?;
    let data_start = LENGTH_BYTES + header.len();
    let data_len = bytes.len() - data_start;

    if let Some(name) = repeated(&mut stored) {
        return Err(malformed(LENGTH_BYTES, format!("tensor `{name}` appears twice in the header")));
    }
    check_places(&mut stored, data_len).map_err(|problem| malformed(LENGTH_BYTES, problem))?;
    let place = |Stored { name, dtype, shape, offsets: [start, _] }| {
        // check_places has held every place to the data's length, which the file holds.
        Entry { name, dtype, shape, offset: data_start + start as usize }
    };
    Ok((data_start, stored.into_iter().map(place).collect()))
}

/// A name that two tensors have.
fn repeated(stored: &mut [Stored]) -> Option<String> {
    stored.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    stored.windows(2).find(|pair| pair[0].name == pair[1].name).map(|pair| pair[0].name.clone())
}

/// Sorts by place, and fails on the first tensor that lies where it cannot.
fn check_places(stored: &mut [Stored], data_len: usize) -> Result<(), String> {
    stored.sort_unstable_by_key(|tensor| tensor.offsets);
    let mut end_before = 0_u64;
    let mut before = "the header".to_owned();
    for Stored { name, dtype, shape, offsets: [start, end] } in &*stored {
        if end < start {
            return Err(format!("tensor `{name}`: its data_offsets [{start}, {end}] are reversed"));
        }
        if *start < end_before {
            return Err(format!(
                "tensor `{name}` starts at {start} of the data and overlaps {before}, which ends at {end_before}"
            ));
        }
        if *start > end_before {
            return Err(format!(
                "the bytes {end_before}..{start} of the data, between {before} and tensor `{name}`, belong to no tensor"
            ));
        }
        let count = shape.iter().try_fold(1_usize, |count, dim| count.checked_mul(*dim));
        let bits = count.and_then(|count| count.checked_mul(dtype.bitsize()));
        let bits = bits.ok_or_else(|| format!("tensor `{name}`: its shape {shape:?} overflows"))?;
        let (size, given) = (bits / 8, end - start);
        if !bits.is_multiple_of(8) || size as u64 != given {
            return Err(format!(
                "tensor `{name}`: {shape:?} of {dtype:?} takes {} bytes, but its data_offsets hold {given}",
                bits.div_ceil(8)
            ));
        }
        if *end > data_len as u64 {
            return Err(format!(
                "tensor `{name}`: its {size} bytes from {start} go past the end of the file, after {data_len} bytes \
                 of data; was the download interrupted?"
            ));
        }
        end_before = *end;
        before = format!("tensor `{name}`");
    }
    if end_before != data_len as u64 {
        return Err(format!("the header describes {end_before} bytes of tensors, but {data_len} follow it"));
    }
    Ok(())
}

/// A tensor as it stands in the JSON.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Start and end, from the start of the data.
    offsets: [u64; 2],
}

/// The whole header, names perhaps repeated.
struct Header(Vec<Stored>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut stored = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > NAME_BYTES_MAX {
                        return Err(de::Error::custom(format!(
                            "a name of {} bytes exceeds the limit of {NAME_BYTES_MAX}",
                            name.len()
                        )));
                    }
                    let of_tensor = |error| de::Error::custom(format!("tensor `{name}`: {error}"));
                    if name == METADATA_KEY {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let Description { dtype, shape, data_offsets } = map.next_value().map_err(of_tensor)?;
                    let dtype: de::value::StringDeserializer<A::Error> = dtype.into_deserializer();
                    let dtype = Dtype::deserialize(dtype).map_err(of_tensor)?;
                    stored.push(Stored { name, dtype, shape: shape.0, offsets: data_offsets });
                }
                Ok(Header(stored))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// The value of a tensor's key.
#[derive(Deserialize)]
#[serde(expecting = "an object with dtype, shape and data_offsets")]
struct Description {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// Dimensions, not more than [`DIMENSIONS_MAX`].
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {DIMENSIONS_MAX} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = values.next_element()? {
                    if shape.len() == DIMENSIONS_MAX {
                        return Err(de::Error::invalid_length(DIMENSIONS_MAX + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}
