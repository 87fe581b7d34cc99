//! Words on their way from a device to the host, for which nobody need wait.
#![allow(unsafe_code)]

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    CudaDevice, CudaError,
    raw::{Event, HostMemory},
    wait,
};
use crate::{KernelError, cuda::DeviceSlice};

const DOING: &str = "give the results of a step";

/// Page-locked room for the words of one batch at a time, and a mark behind the copies that bring them.
pub struct Landing {
    memory: HostMemory,
    room: usize,
    /// Words of the batch under way.
    words: Option<usize>,
    mark: Event,
    device: Arc<CudaDevice>,
}

impl Landing {
    /// Room for `room` words.
    pub fn new(device: &Arc<CudaDevice>, room: usize) -> Result<Landing, CudaError> {
        let bytes = room.max(1).checked_mul(4).ok_or_else(|| device.misuse(format!("{room} words")))?;
        let memory = HostMemory::new(&device.context, bytes, "allocate words for the results of a step")?;
        let mark = Event::new(&device.context)?;
        Ok(Landing { memory, room, words: None, mark, device: device.clone() })
    }

    /// Enqueues copies of `parts`, which come to stand one behind the other, after all work that was enqueued so far.
    /// Without parts it only marks the end of that work. Refused while another batch is under way. Where it fails, no
    /// batch is: what copies may still write here, nobody reads before the mark of a later one.
    pub fn fetch(&mut self, parts: &[DeviceSlice<'_, u32>]) -> Result<(), KernelError> {
        if self.words.is_some() {
            return Err(self.device.misuse("a second batch of words where one is under way").into());
        }
        let words = parts.iter().map(DeviceSlice::len).sum();
        if words > self.room {
            return Err(KernelError::Length {
                operation: "fetch words",
                argument: "parts",
                got: words,
                expected: self.room,
            });
        }
        let mut at = 0;
        for part in parts {
            // SAFETY: within the memory, since all parts together are.
            let to = unsafe { self.memory.pointer().add(4 * at) };
            // SAFETY: as long as the part. Nobody reads the host's memory before the mark behind the copy is reached,
            // and it is kept until the device's work has ended.
            unsafe { self.device.compute.copy_to_host(to, part.address(), 4 * part.len(), DOING)? };
            at += part.len();
        }
        self.mark.record(&self.device.compute, DOING)?;
        self.words = Some(words);
        Ok(())
    }

    /// Waits for the words of the batch under way, `patience` at most: `None` where they have not come by then. The
    /// error is [`CudaError::Timeout`] once `limit` has passed since `started`.
    pub fn take(
        &mut self,
        patience: Duration,
        started: Instant,
        limit: Duration,
    ) -> Result<Option<&[u32]>, CudaError> {
        let Some(words) = self.words else {
            return Err(self.device.misuse("words are waited for, and none are under way"));
        };
        let asked = Instant::now();
        while !self.mark.is_done(DOING)? {
            let (waited, late) = (asked.elapsed(), started.elapsed());
            if late >= limit {
                return Err(wait::late(&self.device.context, DOING, limit));
            }
            if waited >= patience {
                return Ok(None);
            }
            wait::pause(late, (patience - waited).min(limit - late));
        }
        self.words = None;
        // SAFETY: aligned words of the memory, which were zeros or were copied, and no copy is under way any more.
        Ok(Some(unsafe { std::slice::from_raw_parts(self.memory.pointer().as_ptr().cast::<u32>(), words) }))
    }

    /// Forgets the batch under way.
    pub fn reset(&mut self) {
        self.words = None;
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.device.settle();
    }
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landing")
            .field("room", &self.room)
            .field("words", &self.words)
            .finish_non_exhaustive()
    }
}
