// pool[layer][to] = pool[layer][from], whole pages, for each pair (from, to) of `copies` and each layer.
//
// Mapping: a block copies 8 KiB of one page, four vectors of 16 bytes a thread, all four read before the first is
// written; blocks along x share a page, those along y are pairs and those along z layers. A page beyond the pool is
// not copied.
//
// Moves 2 + 2 bytes an element: bound by memory, designed for 85 % of its bandwidth from some 300 blocks on (one page
// of 64 KiB in 40 layers). Has not yet run on a card.
#include "prelude.cuh"

constexpr u32 VECTORS = 4;

KERNEL(kv_copy, 128, 8,
       (u32* __restrict__ pool, const uint2* __restrict__ copies, u32 pairs, u32 layers, u32 blocks,
        u64 page_vectors)) {
    u64 first = (u64)blockIdx.x * blockDim.x * VECTORS + threadIdx.x;
    for (u32 layer = blockIdx.z; layer < layers; layer += gridDim.z) {
        for (u32 pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
            uint2 copy = load_8(copies + pair);
            if (copy.x >= blocks || copy.y >= blocks) continue;
            const u32* from = pool + ((u64)layer * blocks + copy.x) * page_vectors * 4;
            u32* to = pool + ((u64)layer * blocks + copy.y) * page_vectors * 4;
            uint4 v[VECTORS];
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                u64 at = first + j * blockDim.x;
                if (at < page_vectors) v[j] = load_once(from + at * 4);
            }
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                u64 at = first + j * blockDim.x;
                if (at < page_vectors) store_16(to + at * 4, v[j]);
            }
        }
    }
}
