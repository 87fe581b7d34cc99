//! What `ptxas -v` says of each function: registers, stack, spills, shared memory.
//!
//! The same lines come from NVRTC 12 and 13; only architectures before 9.0 report constant memory.

/// What one function takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Its name; C++ names are mangled.
    pub function: String,
    /// Whether it is a kernel. Others are functions that were not inlined into their kernel.
    pub is_kernel: bool,
    /// Registers of a thread; kernels only.
    pub registers: u32,
    /// Bytes of local memory of a thread, spilled registers included.
    pub stack_frame_bytes: u32,
    /// Bytes written when registers run out.
    pub spill_store_bytes: u32,
    /// Bytes read back.
    pub spill_load_bytes: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
    /// Constant memory, where it is reported.
    pub constant_bytes: u32,
}

/// A log that is not understood; nothing may be concluded from it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsageError {
    /// A line of a known kind with an unknown content.
    #[error("line {line} of the compiler's log is not understood: {text:?}")]
    Line {
        /// Line, from 1.
        line: usize,
        /// What it says.
        text: String,
    },
    /// A kernel of which something is missing.
    #[error("the compiler's log does not tell the {what} of {function}")]
    Incomplete {
        /// The kernel.
        function: String,
        /// What is missing.
        what: &'static str,
    },
}

/// What has been read of one function.
#[derive(Default)]
struct Draft {
    usage: Usage,
    has_stack: bool,
    has_registers: bool,
}

/// Reads a log, functions in its order. Lines of other kinds (warnings, times, totals) are passed over.
pub fn parse(log: &str) -> Result<Vec<Usage>, UsageError> {
    let mut drafts: Vec<Draft> = Vec::new();
    // The function that the next lines of numbers are about.
    let mut current: Option<usize> = None;
    for (index, text) in log.lines().enumerate() {
        let refused = || UsageError::Line { line: index + 1, text: text.chars().take(200).collect() };
        let Some(said) = text.strip_prefix("ptxas") else { continue };
        // After `info    :`, or after the `.` of a continuation.
        let said = said.trim_start();
        let said = said.strip_prefix("info").map_or(said, str::trim_start);
        let said = said.trim_start_matches([':', '.', ' ']);
        if let Some(rest) = said.strip_prefix("Compiling entry function '") {
            let (name, _) = rest.split_once('\'').ok_or_else(refused)?;
            let at = draft_of(&mut drafts, name);
            drafts[at].usage.is_kernel = true;
            current = Some(at);
        } else if let Some(name) = said.strip_prefix("Function properties for ") {
            current = Some(draft_of(&mut drafts, name.trim().trim_matches('\'')));
        } else if said.contains("bytes stack frame") {
            let draft = &mut drafts[current.ok_or_else(refused)?];
            read_stack(said, &mut draft.usage).ok_or_else(refused)?;
            draft.has_stack = true;
        } else if let Some(rest) = said.strip_prefix("Used ") {
            let draft = &mut drafts[current.ok_or_else(refused)?];
            read_used(rest, &mut draft.usage).ok_or_else(refused)?;
            draft.has_registers = true;
        }
    }
    drafts.into_iter().map(Draft::finish).collect()
}

impl Draft {
    fn finish(self) -> Result<Usage, UsageError> {
        let what = match (self.has_stack, self.has_registers || !self.usage.is_kernel) {
            (true, true) => return Ok(self.usage),
            (false, _) => "stack frame and spills",
            (true, false) => "registers",
        };
        Err(UsageError::Incomplete { function: self.usage.function, what })
    }
}

fn draft_of(drafts: &mut Vec<Draft>, name: &str) -> usize {
    if let Some(at) = drafts.iter().position(|draft| draft.usage.function == name) {
        return at;
    }
    let usage = Usage { function: name.to_owned(), ..Usage::default() };
    drafts.push(Draft { usage, ..Draft::default() });
    drafts.len() - 1
}

/// `64 bytes stack frame, 56 bytes spill stores, 52 bytes spill loads`
fn read_stack(said: &str, usage: &mut Usage) -> Option<()> {
    let (mut frame, mut stores, mut loads) = (None, None, None);
    for part in said.split(',') {
        let (number, what) = counted(part)?;
        match what {
            "bytes stack frame" => frame = Some(number),
            "bytes spill stores" => stores = Some(number),
            "bytes spill loads" => loads = Some(number),
            _ => return None,
        }
    }
    usage.stack_frame_bytes = frame?;
    usage.spill_store_bytes = stores?;
    usage.spill_load_bytes = loads?;
    Some(())
}

/// `32 registers, used 1 barriers, 64 bytes cumulative stack size, 512 bytes smem, 372 bytes cmem[0]`
fn read_used(said: &str, usage: &mut Usage) -> Option<()> {
    let mut registers = None;
    for part in said.split(',') {
        let part = part.trim();
        let (number, what) = counted(part.strip_prefix("used ").unwrap_or(part))?;
        match what {
            "registers" => registers = Some(number),
            "bytes smem" => usage.shared_bytes = number,
            _ if what.starts_with("bytes cmem[") => {
                usage.constant_bytes = usage.constant_bytes.saturating_add(number);
            }
            // Barriers, cumulative stack, and whatever a later compiler counts.
            _ => {}
        }
    }
    usage.registers = registers?;
    Some(())
}

/// `64 bytes spill stores` as number and the rest.
fn counted(part: &str) -> Option<(u32, &str)> {
    let (number, what) = part.trim().split_once(' ')?;
    Some((number.parse().ok()?, what.trim()))
}

#[cfg(test)]
mod tests;
