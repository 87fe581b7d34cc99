//! Memory taken once, before the first step, and added up.

use crate::{
    Element, KernelError,
    buffer::{Buffer, Plain},
    device::Device,
    linear::Rows,
};

/// Hands out the buffers of a model's activations at load time and adds up what they cost, so that no step has to
/// take memory for them.
pub struct Workspace {
    device: Device,
    bytes: u64,
}

impl Workspace {
    /// An empty workspace on `device`.
    pub fn new(device: &Device) -> Workspace {
        Workspace { device: device.clone(), bytes: 0 }
    }

    /// `len` zeros; `name` stands in an out-of-memory error.
    pub fn buffer<T: Plain>(&mut self, name: &'static str, len: usize) -> Result<Buffer<T>, KernelError> {
        let buffer = Buffer::zeros(&self.device, len, name)?;
        self.bytes += buffer.bytes();
        Ok(buffer)
    }

    /// Room for `rows` rows of `inputs` columns; `name` likewise.
    pub fn rows<T: Element + Plain>(
        &mut self,
        name: &'static str,
        rows: usize,
        inputs: usize,
    ) -> Result<Rows<T>, KernelError> {
        let rows = Rows::zeros(&self.device, rows, inputs, name)?;
        self.bytes += rows.bytes();
        Ok(rows)
    }

    /// Bytes handed out so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
