//! The first layers of a GGUF model as a model of their own: real weights in a file that is easily carried.

use std::ops::Range;

use anyhow::{Context, Result, bail};

const MAGIC: &[u8] = b"GGUF";
/// What tensors are aligned to, where the file does not say.
const ALIGNMENT: u64 = 32;
/// The kind of a value that is a u32.
const U32: u32 = 4;
/// Most entries and tensors that a file may have: more is a broken file.
const COUNT_MAX: u64 = 1 << 20;

/// A tensor's entry, without the offset of its data.
struct Tensor<'a> {
    name: &'a str,
    /// From its name to its type.
    entry: &'a [u8],
    data: Range<u64>,
}

/// The file with only the first `layers` of its layers.
pub(super) fn layers(file: &[u8], layers: u32) -> Result<Vec<u8>> {
    let mut reader = Reader { bytes: file, at: 0 };
    if reader.take(4)? != MAGIC || reader.u32()? != 3 {
        bail!("not a GGUF file of version 3");
    }
    let (tensors, entries) = (reader.count()?, reader.count()?);
    let mut metadata = Vec::new();
    let (mut found, mut alignment) = (None, ALIGNMENT);
    for _ in 0..entries {
        let start = reader.at;
        let key = reader.text()?.to_owned();
        let kind = reader.u32()?;
        let value = reader.at;
        reader.skip_value(kind)?;
        let mut entry = file[start..reader.at].to_vec();
        if key.ends_with(".block_count") {
            if kind != U32 {
                bail!("{key} is no u32");
            }
            let has = u32::from_le_bytes(file[value..value + 4].try_into()?);
            if has < layers {
                bail!("the model has {has} layers, {layers} are wanted");
            }
            entry[value - start..value - start + 4].copy_from_slice(&layers.to_le_bytes());
            found = Some(has);
        }
        if key == "general.alignment" {
            alignment = u64::from(u32::from_le_bytes(file[value..value + 4].try_into()?));
        }
        metadata.extend(entry);
    }
    found.context("the file does not say how many layers it has")?;
    let all = reader.tensors(tensors, alignment)?;
    let kept: Vec<&Tensor<'_>> =
        all.iter().filter(|tensor| layer_of(tensor.name).is_none_or(|layer| layer < layers)).collect();
    let mut out =
        [MAGIC, &3u32.to_le_bytes(), &(kept.len() as u64).to_le_bytes(), &entries.to_le_bytes()].concat();
    out.extend(metadata);
    let mut offset = 0u64;
    for tensor in &kept {
        out.extend(tensor.entry);
        out.extend(offset.to_le_bytes());
        offset += (tensor.data.end - tensor.data.start).next_multiple_of(alignment);
    }
    for tensor in &kept {
        out.resize(out.len().next_multiple_of(alignment as usize), 0);
        let data = tensor.data.start as usize..tensor.data.end as usize;
        out.extend(file.get(data).with_context(|| format!("the data of {} are not there", tensor.name))?);
    }
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    Ok(out)
}

/// `7` of `blk.7.ffn_up.weight`.
fn layer_of(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: u64) -> Result<&'a [u8]> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| self.at.checked_add(bytes));
        let taken = end.and_then(|end| self.bytes.get(self.at..end)).context("the file is cut short")?;
        self.at += taken.len();
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into()?))
    }

    fn count(&mut self) -> Result<u64> {
        let count = self.u64()?;
        if count > COUNT_MAX {
            bail!("{count} entries are more than a file has");
        }
        Ok(count)
    }

    fn text(&mut self) -> Result<&'a str> {
        let bytes = self.u64()?;
        Ok(std::str::from_utf8(self.take(bytes)?)?)
    }

    fn skip_value(&mut self, kind: u32) -> Result<()> {
        match kind {
            8 => {
                self.text()?;
            }
            9 => {
                let (of, count) = (self.u32()?, self.count()?);
                if of == 9 {
                    bail!("arrays of arrays are none of a model's");
                }
                (0..count).try_for_each(|_| self.skip_value(of))?;
            }
            kind => {
                let bytes = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    10..=12 => 8,
                    _ => bail!("values of kind {kind} are unknown"),
                };
                self.take(bytes)?;
            }
        }
        Ok(())
    }

    /// All tensors. Where a tensor's data end is where the next one's begin, whatever its type.
    fn tensors(&mut self, count: u64, alignment: u64) -> Result<Vec<Tensor<'a>>> {
        let (mut tensors, mut offsets) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let start = self.at;
            let name = self.text()?;
            let dimensions = self.u32()?;
            self.take(u64::from(dimensions) * 8 + 4)?;
            let entry = &self.bytes[start..self.at];
            let offset = self.u64()?;
            offsets.push(offset);
            tensors.push(Tensor { name, entry, data: offset..offset });
        }
        let data = (self.at as u64).next_multiple_of(alignment);
        offsets.push((self.bytes.len() as u64).saturating_sub(data));
        offsets.sort_unstable();
        for tensor in &mut tensors {
            let next = offsets.iter().find(|offset| **offset > tensor.data.start);
            let end = *next.with_context(|| format!("the data of {} are beyond the end", tensor.name))?;
            tensor.data = data + tensor.data.start..data + end;
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }

    /// Three layers of one tensor each, and one that is no layer's, not in the order of their data.
    fn model() -> Vec<u8> {
        let mut file = [MAGIC, &3u32.to_le_bytes(), &4u64.to_le_bytes(), &2u64.to_le_bytes()].concat();
        text(&mut file, "llama.block_count");
        file.extend([4u32.to_le_bytes(), 3u32.to_le_bytes()].concat());
        text(&mut file, "tokens");
        file.extend([9u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
        file.extend(2u64.to_le_bytes());
        text(&mut file, "a");
        text(&mut file, "bc");
        for (name, offset) in [("blk.0.w", 32u64), ("blk.1.w", 64), ("blk.2.w", 0), ("norm", 96)] {
            text(&mut file, name);
            file.extend(
                [1u32.to_le_bytes(), 8u32.to_le_bytes(), 0u32.to_le_bytes(), 0u32.to_le_bytes()].concat(),
            );
            file.extend(offset.to_le_bytes());
        }
        file.resize(file.len().next_multiple_of(32), 0);
        for value in [2u8, 0, 1, 9] {
            file.extend([value; 32]);
        }
        file
    }

    #[test]
    fn layers_beyond_the_cut_are_gone_and_all_else_has_its_data() {
        let cut = layers(&model(), 2).unwrap();
        let mut reader = Reader { bytes: &cut, at: 8 };
        assert_eq!((reader.count().unwrap(), reader.count().unwrap()), (3, 2));
        assert_eq!(
            (reader.text().unwrap(), reader.u32().unwrap(), reader.u32().unwrap()),
            ("llama.block_count", 4, 2)
        );
        assert_eq!(reader.text().unwrap(), "tokens");
        let kind = reader.u32().unwrap();
        reader.skip_value(kind).unwrap();
        let tensors = reader.tensors(3, 32).unwrap();
        let read = |tensor: &Tensor<'_>| cut[tensor.data.start as usize..tensor.data.end as usize].to_vec();
        let found: Vec<_> = tensors.iter().map(|tensor| (tensor.name, read(tensor))).collect();
        assert_eq!(found, [("blk.0.w", vec![0; 32]), ("blk.1.w", vec![1; 32]), ("norm", vec![9; 32])]);
    }

    /// Names and data of a file's tensors, after its metadata.
    fn tensors_of(file: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut reader = Reader { bytes: file, at: 8 };
        let (tensors, entries) = (reader.count().unwrap(), reader.count().unwrap());
        for _ in 0..entries {
            reader.text().unwrap();
            let kind = reader.u32().unwrap();
            reader.skip_value(kind).unwrap();
        }
        let tensors = reader.tensors(tensors, ALIGNMENT).unwrap();
        let data = |tensor: &Tensor<'_>| file[tensor.data.start as usize..tensor.data.end as usize].to_vec();
        tensors.iter().map(|tensor| (tensor.name.to_owned(), data(tensor))).collect()
    }

    #[test]
    fn a_file_of_another_writer_keeps_what_is_kept() {
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures/twin.gguf");
        let file = std::fs::read(fixture).unwrap();
        let (whole, cut) = (tensors_of(&file), tensors_of(&layers(&file, 1).unwrap()));
        let expected: Vec<_> =
            whole.into_iter().filter(|(name, _)| layer_of(name).is_none_or(|layer| layer == 0)).collect();
        assert!(cut.iter().any(|(name, _)| name == "blk.0.attn_q.weight") && cut.len() < 20, "{}", cut.len());
        assert_eq!(cut, expected);
    }

    #[test]
    fn what_cannot_be_cut_says_why() {
        let error = |file: &[u8], count| layers(file, count).unwrap_err().to_string();
        assert!(error(b"GGML", 1).contains("cut short") || error(b"GGML", 1).contains("not a GGUF"));
        assert!(error(&model(), 4).contains("has 3 layers, 4 are wanted"));
        assert!(error(&model()[..100], 2).contains("cut short"));
    }
}
