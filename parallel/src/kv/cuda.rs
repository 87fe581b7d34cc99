//! Pages in the memory of a CUDA device: one allocation of their own, slot after slot.

use std::sync::Arc;

use consort_kernels::{
    DType, KernelError,
    cuda::device::{ArenaPlan, CudaDevice, DeviceBuffer},
    element::bf16,
    kv_copy::cuda::kv_copy,
};

use super::KvLayout;
use crate::ids::BlockId;

/// Pairs that one copy takes: more are copied in turn.
const PAIRS_MAX: usize = 4096;

pub(super) struct DevicePages {
    pool: DeviceBuffer<bf16>,
    pairs: DeviceBuffer<u32>,
    device: Arc<CudaDevice>,
}

impl DevicePages {
    /// `blocks` zeroed blocks.
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        layout: &KvLayout,
        blocks: usize,
    ) -> Result<DevicePages, KernelError> {
        if layout.dtype != DType::BF16 {
            let reason = format!("{} pages on a CUDA device; they are bfloat16", layout.dtype);
            return Err(KernelError::Unsupported { operation: "kv store", reason });
        }
        let elements =
            layout.pages.page_elements().saturating_mul(layout.layers_per_page).saturating_mul(blocks);
        let mut plan = ArenaPlan::new();
        let (pool, pairs) =
            (plan.reserve(elements, "the KV cache"), plan.reserve(2 * PAIRS_MAX, "pairs of blocks"));
        let arena = plan.allocate(device)?;
        Ok(DevicePages { pool: arena.buffer(pool), pairs: arena.buffer(pairs), device: device.clone() })
    }

    pub(super) fn pool_mut(&mut self) -> &mut DeviceBuffer<bf16> {
        &mut self.pool
    }

    /// Copies blocks over others', in order with the steps before and after. Pairs were checked.
    pub(super) fn copy(
        &mut self,
        copies: &[(BlockId, BlockId)],
        layout: &KvLayout,
    ) -> Result<(), KernelError> {
        for copies in copies.chunks(PAIRS_MAX) {
            let words: Vec<u32> = copies.iter().flat_map(|(from, to)| [from.0, to.0]).collect();
            self.device.upload(&words, self.pairs.slice_mut(0..words.len()))?;
            let pairs = self.pairs.slice(0..words.len());
            kv_copy(&*self.device, layout.pages, layout.layers_per_page, pairs, self.pool.all_mut())?;
        }
        Ok(())
    }
}
