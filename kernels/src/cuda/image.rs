//! What a cubin says of its kernels: parameters, threads, registers.
//!
//! A cubin is a 64-bit little-endian ELF file. `.nv.info.NAME` lists attributes of one kernel, `.nv.info` of all
//! functions; an attribute is a format byte, a number, and a value of two bytes or (format 4) of a length given first.
//! The numbers are those that `cuobjdump -elf` prints with their names.

use std::ops::Range;

/// `e_machine` of a cubin.
const MACHINE_CUDA: u16 = 190;
const SECTION_HEADER_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;
/// Bit of a symbol's `st_other`: a kernel, as opposed to a function.
const IS_KERNEL: u8 = 0x10;
/// The format of attributes whose value has a length.
const FORMAT_SIZED: u8 = 4;

/// Attributes that are read.
mod attribute {
    pub(super) const MAX_THREADS: u8 = 0x05;
    pub(super) const FRAME_BYTES: u8 = 0x11;
    pub(super) const REQUIRED_THREADS: u8 = 0x10;
    pub(super) const PARAMETER: u8 = 0x17;
    pub(super) const PARAMETERS_BYTES: u8 = 0x19;
    pub(super) const REGISTERS: u8 = 0x2f;
    /// Written instead of `PARAMETER` when a kernel's parameters outgrow its 14 bits of size.
    pub(super) const PARAMETER_V2: u8 = 0x45;
}

/// One parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// First byte in the block of parameters.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
}

/// One kernel of a cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Most threads of a block, from its launch bounds; `None` where it has none.
    pub threads_max: Option<u32>,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread.
    pub frame_bytes: u32,
}

/// Bytes that are no cubin, or not one that is understood.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a readable cubin: {0}")]
pub struct ImageError(String);

impl ImageError {
    fn new(reason: impl Into<String>) -> ImageError {
        ImageError(reason.into())
    }
}

/// The kernels of a cubin, by name.
pub fn kernels(cubin: &[u8]) -> Result<Vec<Kernel>, ImageError> {
    let elf = Elf::of(cubin)?;
    let functions = elf.functions()?;
    let mut kernels = Vec::new();
    for function in functions.iter().filter(|function| function.is_kernel) {
        kernels.push(elf.kernel(&function.name)?);
    }
    if let Some(info) = elf.section(".nv.info") {
        for attribute in attributes(info.bytes)? {
            let value = match attribute.number {
                attribute::REGISTERS | attribute::FRAME_BYTES => Words(attribute.value),
                _ => continue,
            };
            let (symbol, count) = (value.u32(0)?, value.u32(4)?);
            let name =
                functions.iter().find(|function| function.symbol == symbol).map(|function| &function.name);
            if let Some(kernel) = kernels.iter_mut().find(|kernel| Some(&kernel.name) == name) {
                match attribute.number {
                    attribute::REGISTERS => kernel.registers = count,
                    _ => kernel.frame_bytes = count,
                }
            }
        }
    }
    if let Some(kernel) = kernels.iter().find(|kernel| kernel.registers == 0) {
        return Err(ImageError::new(format!("it does not tell the registers of {}", kernel.name)));
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(kernels)
}

/// A part of the file under a name.
struct Section<'a> {
    name: &'a str,
    link: u32,
    bytes: &'a [u8],
}

/// A function of the symbol table.
struct Function {
    symbol: u32,
    name: String,
    is_kernel: bool,
}

struct Elf<'a> {
    sections: Vec<Section<'a>>,
}

impl<'a> Elf<'a> {
    fn of(file: &'a [u8]) -> Result<Elf<'a>, ImageError> {
        // 64 bits, little-endian.
        if !file.starts_with(b"\x7fELF\x02\x01") {
            return Err(ImageError::new("it does not begin as a 64-bit ELF file"));
        }
        let words = Words(file);
        if words.u16(18)? != MACHINE_CUDA {
            return Err(ImageError::new("it is an ELF file of another machine"));
        }
        let table = words.offset(40)?;
        let (entry_bytes, count, names) = (words.u16(58)?, words.u16(60)?, words.u16(62)?);
        if usize::from(entry_bytes) != SECTION_HEADER_BYTES {
            return Err(ImageError::new(format!("its section headers have {entry_bytes} bytes")));
        }
        let header = |index: u16| {
            let start = table.checked_add(usize::from(index) * SECTION_HEADER_BYTES);
            words.part(start.and_then(|start| Some(start..start.checked_add(SECTION_HEADER_BYTES)?)))
        };
        let names = Words(Elf::contents(words, Words(header(names)?))?);
        let mut sections = Vec::with_capacity(usize::from(count));
        for index in 0..count {
            let header = Words(header(index)?);
            let name = names.text(header.u32(0)?)?;
            sections.push(Section { name, link: header.u32(40)?, bytes: Elf::contents(words, header)? });
        }
        Ok(Elf { sections })
    }

    /// A section's bytes; none where it occupies memory only.
    fn contents(file: Words<'a>, header: Words<'_>) -> Result<&'a [u8], ImageError> {
        const NO_BITS: u32 = 8;
        if header.u32(4)? == NO_BITS {
            return Ok(&[]);
        }
        let (start, bytes) = (header.offset(24)?, header.offset(32)?);
        file.part(start.checked_add(bytes).map(|end| start..end))
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    fn functions(&self) -> Result<Vec<Function>, ImageError> {
        const FUNCTION: u8 = 2;
        let table = self.section(".symtab").ok_or_else(|| ImageError::new("it has no symbols"))?;
        let names = usize::try_from(table.link).ok().and_then(|link| self.sections.get(link));
        let names = Words(names.ok_or_else(|| ImageError::new("its symbols have no names"))?.bytes);
        let mut functions = Vec::new();
        for (index, symbol) in table.bytes.chunks_exact(SYMBOL_BYTES).enumerate() {
            let (info, other) = (symbol[4], symbol[5]);
            if info & 0xf == FUNCTION {
                let name = names.text(Words(symbol).u32(0)?)?.to_owned();
                let symbol = u32::try_from(index).map_err(|_| ImageError::new("too many symbols"))?;
                functions.push(Function { symbol, name, is_kernel: other & IS_KERNEL != 0 });
            }
        }
        Ok(functions)
    }

    fn kernel(&self, name: &str) -> Result<Kernel, ImageError> {
        let info = self.section(&format!(".nv.info.{name}"));
        let info = info.ok_or_else(|| ImageError::new(format!("it tells nothing of {name}")))?;
        let mut kernel = Kernel {
            name: name.to_owned(),
            parameters: Vec::new(),
            threads_max: None,
            registers: 0,
            frame_bytes: 0,
        };
        let mut parameters = Vec::new();
        let mut parameters_bytes = 0;
        for attribute in attributes(info.bytes)? {
            let value = Words(attribute.value);
            match attribute.number {
                attribute::PARAMETER | attribute::PARAMETER_V2 => {
                    let bytes = if attribute.number == attribute::PARAMETER {
                        value.u32(8)? >> 18
                    } else {
                        u32::from(value.u16(8)?)
                    };
                    parameters.push((value.u16(4)?, Parameter { offset: value.u16(6)?.into(), bytes }));
                }
                attribute::PARAMETERS_BYTES => parameters_bytes = value.u16(0)?.into(),
                attribute::MAX_THREADS | attribute::REQUIRED_THREADS => {
                    let sides = [value.u32(0)?, value.u32(4)?, value.u32(8)?];
                    kernel.threads_max = sides.into_iter().try_fold(1u32, u32::checked_mul);
                }
                _ => {}
            }
        }
        parameters.sort_by_key(|(ordinal, _)| *ordinal);
        let in_order = parameters.iter().enumerate().all(|(at, (ordinal, _))| at == usize::from(*ordinal));
        kernel.parameters = parameters.into_iter().map(|(_, parameter)| parameter).collect();
        let mut end = 0;
        for parameter in &kernel.parameters {
            if parameter.offset < end {
                return Err(ImageError::new(format!("parameters of {name} overlap")));
            }
            end = parameter.offset.saturating_add(parameter.bytes);
        }
        if !in_order || end != parameters_bytes {
            return Err(ImageError::new(format!(
                "{name} has {parameters_bytes} bytes of parameters, and those listed end at {end}"
            )));
        }
        Ok(kernel)
    }
}

/// One attribute.
struct Attribute<'a> {
    number: u8,
    value: &'a [u8],
}

fn attributes(mut bytes: &[u8]) -> Result<Vec<Attribute<'_>>, ImageError> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let words = Words(bytes);
        let short = words.u16(2)?;
        let value = if bytes[0] == FORMAT_SIZED { 4..4 + usize::from(short) } else { 2..4 };
        let end = value.end;
        found.push(Attribute { number: bytes[1], value: words.part(Some(value))? });
        bytes = &bytes[end..];
    }
    Ok(found)
}

/// Bytes read as little-endian numbers, in bounds or not at all.
#[derive(Clone, Copy)]
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn part(self, range: Option<Range<usize>>) -> Result<&'a [u8], ImageError> {
        range.and_then(|range| self.0.get(range)).ok_or_else(|| ImageError::new("it ends too early"))
    }

    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], ImageError> {
        let part = self.part(at.checked_add(N).map(|end| at..end))?;
        part.try_into().map_err(|_| ImageError::new("it ends too early"))
    }

    fn u16(self, at: usize) -> Result<u16, ImageError> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(self, at: usize) -> Result<u32, ImageError> {
        self.array(at).map(u32::from_le_bytes)
    }

    /// A 64-bit position or length within the file.
    fn offset(self, at: usize) -> Result<usize, ImageError> {
        let offset = u64::from_le_bytes(self.array(at)?);
        usize::try_from(offset).map_err(|_| ImageError::new("it ends too early"))
    }

    /// A text up to its NUL.
    fn text(self, at: u32) -> Result<&'a str, ImageError> {
        let rest = usize::try_from(at).ok().and_then(|at| self.0.get(at..));
        let text = rest.and_then(|rest| rest.split(|&byte| byte == 0).next());
        text.and_then(|text| std::str::from_utf8(text).ok())
            .ok_or_else(|| ImageError::new("a name is no text"))
    }
}

#[cfg(test)]
mod tests;
