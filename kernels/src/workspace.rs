//! Memory taken once, before the first step, and accounted for by name.

use crate::{
    KernelError,
    buffer::{Buffer, Plain},
    device::Device,
};

/// Hands out the buffers of a model's activations at load time and remembers what each costs, so that a step never
/// allocates and a report can say where memory went.
pub struct Workspace {
    device: Device,
    entries: Vec<(&'static str, u64)>,
}

impl Workspace {
    /// An empty workspace on `device`.
    pub fn new(device: &Device) -> Workspace {
        Workspace { device: device.clone(), entries: Vec::new() }
    }

    /// `len` zeros named `name`.
    pub fn buffer<T: Plain>(&mut self, name: &'static str, len: usize) -> Result<Buffer<T>, KernelError> {
        let buffer = Buffer::zeros(&self.device, len, name)?;
        self.entries.push((name, buffer.bytes()));
        Ok(buffer)
    }

    /// Bytes handed out so far.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Name and bytes of each buffer, in order of creation.
    pub fn entries(&self) -> &[(&'static str, u64)] {
        &self.entries
    }
}
