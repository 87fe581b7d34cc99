//! Memory taken once, before the first step, and added up.

use crate::{
    KernelError,
    buffer::{Buffer, Plain},
    device::Device,
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

    /// Bytes handed out so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
