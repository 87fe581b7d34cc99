//! The header of a GGUF file: metadata and tensor entries. Works on bytes alone, trusts none of them, and never
//! allocates more than a small multiple of the bytes that it has seen.

use std::collections::{BTreeMap, BTreeSet};

/// The first bytes of every GGUF file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Versions of one layout; big-endian files came with the last.
const VERSIONS: [u32; 2] = [2, 3];
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment that is believed; real files use 32 or 64.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Longest key, by the definition of the format.
const KEY_BYTES_MAX: usize = 65_535;
/// Longest name of a tensor; ggml itself keeps 63 bytes.
const NAME_BYTES_MAX: usize = 1024;
/// Dimensions of a tensor in ggml.
const DIMENSIONS_MAX: u32 = 4;
/// Shortest metadata entry: an empty key, its type, one byte of value.
const METADATA_ENTRY_BYTES_MIN: usize = 8 + 4 + 1;
/// Shortest tensor entry: an empty name, no dimensions, type and offset.
const TENSOR_ENTRY_BYTES_MIN: usize = 8 + 4 + 4 + 8;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// An array that nobody reads: of a type, or with values, beyond the getters.
    OtherArray,
}

/// A tensor as the header describes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    /// Outermost dimension first, unlike in the file.
    pub(super) shape: Vec<usize>,
    pub(super) kind: u32,
    /// From the start of the data.
    pub(super) offset: u64,
}

/// Everything before the data.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<TensorEntry>,
    /// Where the data starts; within the file.
    pub(super) data_start: usize,
    /// What the offset of every tensor is a multiple of; a power of two.
    pub(super) alignment: usize,
}

/// Where and why a header cannot be read.
#[derive(Debug, PartialEq)]
pub(super) struct Fault {
    pub(super) offset: usize,
    pub(super) problem: String,
}

impl Fault {
    fn within(mut self, place: impl FnOnce() -> String) -> Self {
        self.problem = format!("{}: {}", place(), self.problem);
        self
    }
}

/// Reads the header of a file that starts with [`MAGIC`].
pub(super) fn parse(bytes: &[u8]) -> Result<Header, Fault> {
    let mut cursor = Cursor { bytes, at: 0 };
    cursor.take(MAGIC.len())?;
    let version_at = cursor.at;
    let version = cursor.u32()?;
    if !VERSIONS.contains(&version) {
        let problem = if VERSIONS.contains(&version.swap_bytes()) {
            "the file is big-endian; only little-endian files are supported".to_owned()
        } else {
            let [first, last] = VERSIONS;
            format!(
                "GGUF version {version} is not supported, only {first} and {last}; convert the model anew"
            )
        };
        return Err(Fault { offset: version_at, problem });
    }
    let tensor_count = cursor.count(TENSOR_ENTRY_BYTES_MIN, "tensors")?;
    let metadata_count = cursor.count(METADATA_ENTRY_BYTES_MIN, "metadata entries")?;

    let mut metadata = BTreeMap::new();
    for index in 0..metadata_count {
        let place = || format!("metadata entry {index} of {metadata_count}");
        let offset = cursor.at;
        let key = cursor.name(KEY_BYTES_MAX).map_err(|fault| fault.within(place))?;
        let value = cursor.value().map_err(|fault| fault.within(|| format!("metadata key `{key}`")))?;
        if metadata.contains_key(&key) {
            return Err(Fault { offset, problem: format!("metadata key `{key}` appears twice") });
        }
        metadata.insert(key, value);
    }

    let mut names = BTreeSet::new();
    let mut tensors = Vec::new();
    for index in 0..tensor_count {
        let offset = cursor.at;
        let place = || format!("tensor entry {index} of {tensor_count}");
        let entry = cursor.tensor_entry().map_err(|fault| fault.within(place))?;
        if !names.insert(entry.name.clone()) {
            return Err(Fault { offset, problem: format!("tensor `{}` appears twice", entry.name) });
        }
        tensors.push(entry);
    }
    let alignment = alignment(&metadata, cursor.at)?;
    // A file without data may end before the padding does.
    let data_start = cursor.at.next_multiple_of(alignment).min(bytes.len());
    Ok(Header { metadata, tensors, data_start, alignment })
}

fn alignment(metadata: &BTreeMap<String, Value>, header_end: usize) -> Result<usize, Fault> {
    let alignment = match metadata.get(ALIGNMENT_KEY) {
        None => DEFAULT_ALIGNMENT,
        Some(Value::Unsigned(alignment)) => *alignment,
        Some(_) => 0,
    };
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        let problem = format!("`{ALIGNMENT_KEY}` must be a power of two up to {ALIGNMENT_MAX}");
        return Err(Fault { offset: header_end, problem });
    }
    Ok(alignment as usize)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn fault(&self, problem: impl Into<String>) -> Fault {
        Fault { offset: self.at, problem: problem.into() }
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Fault> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        let Some(taken) = taken else {
            return Err(self.fault(format!("{count} bytes are wanted, but {} are left", self.remaining())));
        };
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of items of which each takes at least `bytes_min`, so that it can be held to what is left.
    fn count(&mut self, bytes_min: usize, items: &str) -> Result<usize, Fault> {
        let offset = self.at;
        let count = self.u64()?;
        let possible = self.remaining() / bytes_min;
        match usize::try_from(count) {
            Ok(count) if count <= possible => Ok(count),
            _ => {
                let problem = format!("{count} {items} cannot fit in the {} bytes left", self.remaining());
                Err(Fault { offset, problem })
            }
        }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let length = self.count(1, "bytes of a string")?;
        let offset = self.at;
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => {
                let offset = offset + error.valid_up_to();
                Err(Fault { offset, problem: "a string is not UTF-8".to_owned() })
            }
        }
    }

    /// A string that will stand in messages.
    fn name(&mut self, bytes_max: usize) -> Result<String, Fault> {
        let offset = self.at;
        let name = self.string()?;
        if name.len() > bytes_max {
            let problem = format!("a name of {} bytes exceeds the limit of {bytes_max}", name.len());
            return Err(Fault { offset, problem });
        }
        Ok(name)
    }

    fn value(&mut self) -> Result<Value, Fault> {
        let kind = self.u32()?;
        Ok(match kind {
            0 => Value::Unsigned(u64::from(u8::from_le_bytes(self.array()?))),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Unsigned(u64::from(self.u32()?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.array::<1>()? != [0]),
            8 => Value::String(self.string()?),
            9 => self.array_value()?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.fault(format!("there is no value type {other}"))),
        })
    }

    fn array_value(&mut self) -> Result<Value, Fault> {
        let kind = self.u32()?;
        match kind {
            0 => self.integers::<1>(|bytes| Some(i32::from(u8::from_le_bytes(bytes)))),
            1 => self.integers::<1>(|bytes| Some(i32::from(i8::from_le_bytes(bytes)))),
            2 => self.integers::<2>(|bytes| Some(i32::from(u16::from_le_bytes(bytes)))),
            3 => self.integers::<2>(|bytes| Some(i32::from(i16::from_le_bytes(bytes)))),
            4 => self.integers::<4>(|bytes| u32::from_le_bytes(bytes).try_into().ok()),
            5 => self.integers::<4>(|bytes| Some(i32::from_le_bytes(bytes))),
            10 => self.integers::<8>(|bytes| u64::from_le_bytes(bytes).try_into().ok()),
            11 => self.integers::<8>(|bytes| i64::from_le_bytes(bytes).try_into().ok()),
            6 => {
                let elements = self.elements::<4>()?;
                Ok(Value::F32s(elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
            }
            7 => self.elements::<1>().map(|_| Value::OtherArray),
            12 => self.elements::<8>().map(|_| Value::OtherArray),
            8 => {
                let count = self.count(size_of::<u64>(), "strings")?;
                // At most three times the bytes left: each string has a length of eight.
                let mut strings = Vec::with_capacity(count);
                for index in 0..count {
                    let string =
                        self.string().map_err(|fault| fault.within(|| format!("element {index}")))?;
                    strings.push(string);
                }
                Ok(Value::Strings(strings))
            }
            9 => Err(self.fault("arrays of arrays are not supported")),
            other => Err(self.fault(format!("there is no array element type {other}"))),
        }
    }

    /// The elements of an array of fixed width, in place.
    fn elements<const WIDTH: usize>(&mut self) -> Result<&'a [[u8; WIDTH]], Fault> {
        let count = self.count(WIDTH, "array elements")?;
        // `count` has held the product to the bytes left.
        Ok(self.take(count * WIDTH)?.as_chunks::<WIDTH>().0)
    }

    fn integers<const WIDTH: usize>(
        &mut self,
        convert: impl Fn([u8; WIDTH]) -> Option<i32>,
    ) -> Result<Value, Fault> {
        let elements = self.elements::<WIDTH>()?;
        // Not collected: that would grow step by step, with old and new in memory at once.
        let mut values = Vec::with_capacity(elements.len());
        for bytes in elements {
            let Some(value) = convert(*bytes) else { return Ok(Value::OtherArray) };
            values.push(value);
        }
        Ok(Value::I32s(values))
    }

    fn tensor_entry(&mut self) -> Result<TensorEntry, Fault> {
        let name = self.name(NAME_BYTES_MAX)?;
        let named = |fault: Fault| fault.within(|| format!("`{name}`"));
        let dimensions_at = self.at;
        let dimensions = self.u32().map_err(named)?;
        if dimensions > DIMENSIONS_MAX {
            let problem = format!("`{name}` has {dimensions} dimensions; at most {DIMENSIONS_MAX} exist");
            return Err(Fault { offset: dimensions_at, problem });
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let offset = self.at;
            let size = self.u64().map_err(named)?;
            let problem = || format!("`{name}` has a dimension of {size}");
            shape.push(usize::try_from(size).map_err(|_| Fault { offset, problem: problem() })?);
        }
        shape.reverse();
        let kind = self.u32().map_err(named)?;
        let offset = self.u64().map_err(named)?;
        Ok(TensorEntry { name, shape, kind, offset })
    }
}
