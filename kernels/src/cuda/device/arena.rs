//! All memory of a shard from one allocation.
#![allow(unsafe_code)]

use std::{fmt, marker::PhantomData, ops::Range, sync::Arc};

use super::{
    CudaDevice, CudaError, lock,
    raw::{DeviceMemory, SharedMemory},
};
use crate::{
    buffer::Plain,
    cuda::{DeviceSlice, DeviceSliceMut},
};

/// Where parts start: what cuBLASLt and the widest loads like best.
const ALIGNMENT: u64 = 256;

/// What a shard needs, added up before anything is taken.
#[derive(Debug, Default)]
pub struct ArenaPlan {
    parts: Vec<(String, u64)>,
    /// `u64::MAX` where the sum is beyond all memory.
    bytes: u64,
    identity: Arc<()>,
}

/// A part of a plan, to be exchanged for the part of the arena.
#[derive(Debug)]
pub struct Reservation<T> {
    offset: u64,
    len: usize,
    plan: Arc<()>,
    element: PhantomData<T>,
}

/// Device memory, zeroed, for the parts of one plan.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<ArenaMemory>,
    plan: Arc<()>,
}

/// `len` elements of `T` in an arena, which stays as long as they do.
pub struct DeviceBuffer<T> {
    memory: Arc<ArenaMemory>,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

/// The allocation, if there is anything in it, and what waits for its last use.
pub(super) struct ArenaMemory {
    memory: Option<Memory>,
    device: Arc<CudaDevice>,
}

/// Memory that a device's kernels use.
pub(super) enum Memory {
    /// Of this process alone.
    Own(DeviceMemory),
    /// That other processes may map, or one of them has made.
    Shared(SharedMemory),
}

impl Memory {
    fn address(&self) -> u64 {
        match self {
            Memory::Own(memory) => memory.address(),
            Memory::Shared(memory) => memory.address(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Memory::Own(memory) => memory.bytes(),
            Memory::Shared(memory) => memory.bytes(),
        }
    }
}

impl ArenaMemory {
    /// Memory that stays until nobody holds it, no graph that was recorded meanwhile either, and the device's work has
    /// ended.
    pub(super) fn keep(memory: Option<Memory>, device: &Arc<CudaDevice>) -> Arc<ArenaMemory> {
        let memory = Arc::new(ArenaMemory { memory, device: device.clone() });
        let mut arenas = lock(&device.arenas);
        arenas.retain(|arena| arena.strong_count() > 0);
        arenas.push(Arc::downgrade(&memory));
        memory
    }

    /// Where it is, if there is anything in it.
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, Memory::address)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.bytes() as u64)
    }

    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }
}

impl ArenaPlan {
    /// Nothing yet.
    pub fn new() -> ArenaPlan {
        ArenaPlan::default()
    }

    /// Room for `len` elements, starting on 256 bytes; `what` stands in an out-of-memory error.
    pub fn reserve<T: Plain>(&mut self, len: usize, what: impl Into<String>) -> Reservation<T> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let offset = self.bytes;
        self.parts.push((what.into(), bytes));
        let end = offset.saturating_add(bytes);
        self.bytes = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        Reservation { offset, len, plan: self.identity.clone(), element: PhantomData }
    }

    /// Bytes of all parts so far, gaps included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes all of it at once. The error names the bytes wanted and free, and the largest parts.
    pub fn allocate(self, device: &Arc<CudaDevice>) -> Result<Arena, CudaError> {
        self.allocate_by(device, |bytes, doing| {
            DeviceMemory::new(&device.context, bytes, doing).map(Memory::Own)
        })
    }

    /// [`ArenaPlan::allocate`] by a function of bytes, more than none, and of what they are for.
    pub(super) fn allocate_by(
        self,
        device: &Arc<CudaDevice>,
        allocate: impl FnOnce(usize, &str) -> Result<Memory, CudaError>,
    ) -> Result<Arena, CudaError> {
        let ArenaPlan { parts, bytes, identity } = self;
        let memory = match usize::try_from(bytes) {
            Ok(0) => None,
            Ok(wanted) if bytes < u64::MAX => {
                let made = allocate(wanted, "allocate the memory of a shard");
                Some(made.map_err(|error| with_parts(error, &parts))?)
            }
            _ => return Err(beyond_all_memory(device, bytes, &parts)),
        };
        if let Some(memory) = &memory {
            // SAFETY: memory that nobody else knows yet; what uses it later comes after this on the same stream.
            unsafe { device.compute.zero(memory.address(), memory.bytes(), "zero the memory of a shard")? };
        }
        Ok(Arena { memory: ArenaMemory::keep(memory, device), plan: identity })
    }
}

fn beyond_all_memory(device: &CudaDevice, bytes: u64, parts: &[(String, u64)]) -> CudaError {
    let error = CudaError::OutOfMemory {
        device: device.context.label().to_owned(),
        doing: "allocate the memory of a shard".to_owned(),
        wanted: Some(bytes),
        free: device.memory().ok().map(|(free, _)| free),
        parts: Vec::new(),
    };
    with_parts(error, parts)
}

/// The same error, with the parts by size.
fn with_parts(error: CudaError, parts: &[(String, u64)]) -> CudaError {
    match error {
        CudaError::OutOfMemory { device, doing, wanted, free, .. } => {
            let mut parts = parts.to_vec();
            parts.sort_by(|(_, left), (_, right)| right.cmp(left));
            CudaError::OutOfMemory { device, doing, wanted, free, parts }
        }
        error => error,
    }
}

impl Arena {
    /// The part that was reserved, all zeros. Panics when it was reserved in the plan of another arena.
    pub fn buffer<T: Plain>(&self, reservation: Reservation<T>) -> DeviceBuffer<T> {
        let Reservation { offset, len, plan, element } = reservation;
        assert!(Arc::ptr_eq(&plan, &self.plan), "a reservation of another plan");
        DeviceBuffer { memory: self.memory.clone(), address: self.memory.address() + offset, len, element }
    }

    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Whose memory it is.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.memory.device
    }

    pub(super) fn memory(&self) -> &ArenaMemory {
        &self.memory
    }
}

impl<T: Plain> DeviceBuffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is on its device, and on peers that reach it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whose memory it is.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.memory.device
    }

    /// The elements of `range`, to read. Panics when it exceeds the buffer, as slices do.
    pub fn slice(&self, range: Range<usize>) -> DeviceSlice<'_, T> {
        self.all().range(range)
    }

    /// The elements of `range`, to write. Panics when it exceeds the buffer.
    pub fn slice_mut(&mut self, range: Range<usize>) -> DeviceSliceMut<'_, T> {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        let address = self.address + (range.start * size_of::<T>()) as u64;
        // SAFETY: within this part of the arena, which lives as long as the buffer; the borrow is exclusive.
        unsafe { DeviceSliceMut::new(address, range.len()) }
    }

    /// All elements, to read.
    pub fn all(&self) -> DeviceSlice<'_, T> {
        // SAFETY: this part of the arena is the buffer's alone, initialised (zeros are values of Plain types), and
        // lives as long. Work that was enqueued through an exclusive view comes first, since streams are in order.
        unsafe { DeviceSlice::new(self.address, self.len) }
    }

    /// All elements, to write.
    pub fn all_mut(&mut self) -> DeviceSliceMut<'_, T> {
        self.slice_mut(0..self.len)
    }
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        if self.memory.is_some() {
            self.device.settle();
        }
    }
}

impl fmt::Debug for ArenaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaMemory").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::bf16;

    #[test]
    fn parts_of_a_plan_start_on_256_bytes_and_add_up() {
        let mut plan = ArenaPlan::new();
        let first = plan.reserve::<f32>(3, "three");
        let second = plan.reserve::<bf16>(129, "many");
        let third = plan.reserve::<u32>(0, "none");
        assert_eq!((first.offset, second.offset, third.offset, plan.bytes()), (0, 256, 768, 768));
    }

    #[test]
    fn a_plan_beyond_all_memory_stays_beyond_it() {
        let mut plan = ArenaPlan::new();
        plan.reserve::<f32>(usize::MAX, "too much");
        plan.reserve::<f32>(1, "more");
        assert_eq!(plan.bytes(), u64::MAX);
    }
}
