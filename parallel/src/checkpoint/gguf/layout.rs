//! Whether the tensors of a GGUF file lie one after the other, as every writer puts them: each at a multiple of the
//! alignment, right behind the one before it, none beyond the file. An offset or a shape that was damaged shows here,
//! before anything is read; and what the tensors take together is bounded by the file.

use super::{parse::TensorEntry, types};

/// Where a tensor lies, in bytes from the start of the data. Nobody knows the end of a type that is not known.
struct Extent<'a> {
    name: &'a str,
    start: u64,
    end: Option<u64>,
}

/// Fails on the first tensor that lies where it cannot, with a message that names it. `alignment` is a power of two.
pub(super) fn check(
    entries: &[TensorEntry],
    data_start: usize,
    alignment: usize,
    file_len: usize,
) -> Result<(), String> {
    let alignment = alignment as u64;
    let data_len = (file_len - data_start) as u64;
    let mut extents = Vec::with_capacity(entries.len());
    for entry in entries {
        let extent = extent(entry, alignment, data_len);
        extents.push(extent.map_err(|problem| format!("tensor `{}`: {problem}", entry.name))?);
    }
    // Empty tensors first: they share their start with the one behind them.
    extents.sort_unstable_by_key(|extent| (extent.start, extent.end));
    let mut before: Option<&Extent<'_>> = None;
    for extent in &extents {
        let (previous, end) = match before {
            None => (String::from("the header"), Some(0)),
            Some(before) => (format!("tensor `{}`", before.name), before.end),
        };
        if let Some(end) = end {
            let name = extent.name;
            if extent.start < end {
                return Err(format!(
                    "tensor `{name}` starts at {} of the data and overlaps {previous}, which ends at {end}",
                    extent.start
                ));
            }
            // No overflow: `end` lies within the file.
            let expected = end.next_multiple_of(alignment);
            if extent.start > expected {
                return Err(format!(
                    "the bytes {expected}..{} of the data, between {previous} and tensor `{name}`, belong to no tensor",
                    extent.start
                ));
            }
        }
        before = Some(extent);
    }
    Ok(())
}

fn extent(entry: &TensorEntry, alignment: u64, data_len: u64) -> Result<Extent<'_>, String> {
    let TensorEntry { name, shape, kind, offset } = entry;
    let start = *offset;
    if !start.is_multiple_of(alignment) {
        return Err(format!("its offset {start} is no multiple of the alignment {alignment}"));
    }
    if start > data_len {
        return Err(format!(
            "its offset {start} goes past the end of the file, after {data_len} bytes of data"
        ));
    }
    let (type_name, block) = match types::encoding(*kind) {
        Ok(encoding) => (encoding.name().to_owned(), Some(encoding.block())),
        Err(name) => (name, types::block_of_other(*kind)),
    };
    let Some((elements, bytes)) = block else { return Ok(Extent { name, start, end: None }) };
    let cols = shape.last().copied().unwrap_or(1);
    if !cols.is_multiple_of(elements) {
        return Err(format!("rows of {cols} elements cannot be {type_name} blocks of {elements}"));
    }
    let count = shape.iter().try_fold(1_usize, |count, dim| count.checked_mul(*dim));
    let size = count
        .and_then(|count| (count / elements).checked_mul(bytes))
        .ok_or_else(|| format!("its shape {shape:?} overflows"))? as u64;
    // No overflow: `start` lies within the data.
    if size > data_len - start {
        return Err(format!(
            "its {size} bytes from {start} go past the end of the file, after {data_len} bytes of data; was the \
             download interrupted?"
        ));
    }
    Ok(Extent { name, start, end: Some(start + size) })
}
