//! What the machine really executes: nvdisasm's listing of a cubin.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::process;

/// One function's instructions, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) instructions: Vec<Instruction>,
    /// Label and address of the instruction after it.
    labels: Vec<(String, u64)>,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    address: u64,
    /// With its modifiers: `LDG.E.128.CONSTANT`.
    pub(super) opcode: String,
    /// Where a branch goes.
    target: Option<String>,
}

/// Lists a cubin's functions.
pub(super) fn disassemble(disassembler: &Path, cubin: &Path) -> Result<Vec<Function>> {
    let mut command = Command::new(disassembler);
    command.arg("--print-code").arg(cubin).stdin(Stdio::null());
    // It warns of every cubin of an older compiler, which it lists all the same.
    let output = command.output().map_err(|error| process::cannot_start(&command, error))?;
    process::check(&command, output.status)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let listing = String::from_utf8(output.stdout).context("nvdisasm printed no text")?;
    parse(&listing).with_context(|| format!("cannot read the listing of {}", cubin.display()))
}

/// Reads a listing; an error where it holds nothing that looks like one.
pub(super) fn parse(listing: &str) -> Result<Vec<Function>> {
    let mut functions: Vec<Function> = Vec::new();
    let mut waiting_labels: Vec<String> = Vec::new();
    for line in listing.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".text.").and_then(|rest| rest.strip_suffix(':')) {
            functions.push(Function { name: name.to_owned(), ..Function::default() });
            waiting_labels.clear();
        } else if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L")) {
            waiting_labels.push(label.to_owned());
        } else if let (Some(function), Some(instruction)) = (functions.last_mut(), Instruction::of(line)) {
            function.labels.extend(waiting_labels.drain(..).map(|label| (label, instruction.address)));
            function.instructions.push(instruction);
        }
    }
    if functions.is_empty() || functions.iter().any(|function| function.instructions.is_empty()) {
        bail!("it holds no functions with instructions; is this another version of nvdisasm?");
    }
    Ok(functions)
}

impl Instruction {
    /// `/*0060*/  @!P0 LDG.E.128 R4, [R4.64] ;`
    fn of(line: &str) -> Option<Instruction> {
        let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
        let address = u64::from_str_radix(address, 16).ok()?;
        let mut words = rest.split_whitespace().peekable();
        // Padding that is never executed stands between others to keep distances.
        if matches!(words.peek(), Some(&("@!PT" | "@!UPT"))) {
            return None;
        }
        let mut words = words.skip_while(|word| word.starts_with('@'));
        let opcode = words.next()?.trim_end_matches(';').to_owned();
        let target = rest
            .split_once("`(")
            .and_then(|(_, after)| after.split_once(')'))
            .map(|(label, _)| label.to_owned());
        let is_branch = opcode.split('.').next() == Some("BRA");
        Some(Instruction { address, opcode, target: target.filter(|_| is_branch) })
    }

    /// Whether this is `pattern`: the same operation with at least these modifiers, in any place. `LDG.128` is
    /// `LDG.E.NA.128.CONSTANT`.
    pub(super) fn is(&self, pattern: &str) -> bool {
        let mut wanted = pattern.split('.');
        let mut parts = self.opcode.split('.');
        parts.next() == wanted.next()
            && wanted.all(|modifier| self.opcode.split('.').skip(1).any(|part| part == modifier))
    }
}

impl Function {
    /// Whether it holds `pattern` anywhere.
    pub(super) fn has(&self, pattern: &str) -> bool {
        self.instructions.iter().any(|instruction| instruction.is(pattern))
    }

    /// The bodies of its innermost loops: from the target of a backward branch to the branch, with no other inside.
    pub(super) fn innermost_loops(&self) -> Vec<&[Instruction]> {
        let mut loops: Vec<(usize, usize)> = Vec::new();
        for (end, branch) in self.instructions.iter().enumerate() {
            let label = self.labels.iter().find(|(label, _)| Some(label) == branch.target.as_ref());
            // Code ends with a branch to itself, which nobody reaches.
            if let Some((_, address)) = label.filter(|(_, address)| *address < branch.address) {
                let start = self.instructions.partition_point(|instruction| instruction.address < *address);
                loops.push((start, end));
            }
        }
        let inner = |&(start, end): &(usize, usize)| {
            !loops.iter().any(|&(from, to)| start <= from && to <= end && (start, end) != (from, to))
        };
        loops.iter().filter(|body| inner(body)).map(|&(start, end)| &self.instructions[start..=end]).collect()
    }
}

#[cfg(test)]
mod tests;
