// out = softmax(scale · q Kᵀ) V for sequences with any number of new tokens, causal, over paged keys and values.
//
// Mapping: a block takes one KV head (y) and a tile of 64 pairs (token, query head of that KV head) of one sequence (x,
// by a table that the host makes, longest first). Each of four warps owns 16 rows and all 64 keys of a tile, so that
// weights go from scores to the next product in registers; for heads wider than 128 a tile is 32 pairs and 32 keys, and
// two warps share 16 rows as in decode. Tiles of keys come in by 16-byte asynchronous copies, one ahead of the
// products. Tiles that no row sees are not read; only those that some row does not see in full are masked.
//
// `_chunked_` kernels keep the sums of chunks apart and join them left to right, as decode does with the same `chunk`:
// same bits, for twice the accumulators.
//
// A tile of keys takes 4 · 64 · 64 · DIM operations for 4 · 64 · DIM bytes, 64 a byte, from the L2 as a rule: bound by
// the matrix units, and on Hopper by shared memory, from which a fragment of 512 bytes feeds but two products (64 Ki
// operations for four cycles of 128 bytes: 470 TFLOP/s on 132 multiprocessors at 1.75 GHz, before softmax). Designed
// for 300 TFLOP/s there, a third of the dense peak, which only wgmma reaches; and for half of the peak of an A100. It
// has not yet run on a card.
#include "prelude.cuh"
#include "attention.cuh"

template <class L, bool CHUNKED> DEVICE void prefill(const Call& call) {
    uint2 work = load_8(call.work + (u64)blockIdx.x * 2);
    RowTile rows = row_tile(call, span_at(call, work.x), blockIdx.y, work.y * L::ROWS);
    if (rows.first >= rows.pairs) return;
    u32 start = first_key_seen(rows.position(0), call.window), stop = rows.position(L::ROWS - 1) + 1;
    Sums<L> sums;
    attend<L, CHUNKED>(call, rows, blockIdx.y, start, stop, sums);
    store_rows(call, rows, sums);
}

constexpr Queries SHARED = Queries::InSharedMemory;

// dynamic shared memory: attention_prefill_d64 46080 bytes
// dynamic shared memory: attention_prefill_d96 66560 bytes
// dynamic shared memory: attention_prefill_d128 87040 bytes
// dynamic shared memory: attention_prefill_d256 87296 bytes
// dynamic shared memory: attention_prefill_chunked_d64 46080 bytes
// dynamic shared memory: attention_prefill_chunked_d96 66560 bytes
// dynamic shared memory: attention_prefill_chunked_d128 87040 bytes
// dynamic shared memory: attention_prefill_chunked_d256 87296 bytes
KERNEL(attention_prefill_d64, 128, 2, (Call call)) { prefill<Layout<64, 4, 1, 2>, false>(call); }
KERNEL(attention_prefill_d96, 128, 2, (Call call)) { prefill<Layout<96, 4, 1, 2>, false>(call); }
KERNEL(attention_prefill_d128, 128, 2, (Call call)) { prefill<Layout<128, 4, 1, 2>, false>(call); }
KERNEL(attention_prefill_d256, 128, 2, (Call call)) { prefill<Layout<256, 2, 2, 2, SHARED>, false>(call); }

KERNEL(attention_prefill_chunked_d64, 128, 2, (Call call)) { prefill<Layout<64, 4, 1, 2>, true>(call); }
KERNEL(attention_prefill_chunked_d96, 128, 2, (Call call)) { prefill<Layout<96, 4, 1, 2, SHARED>, true>(call); }
KERNEL(attention_prefill_chunked_d128, 128, 2, (Call call)) { prefill<Layout<128, 4, 1, 2, SHARED>, true>(call); }
KERNEL(attention_prefill_chunked_d256, 128, 2, (Call call)) { prefill<Layout<256, 2, 2, 2, SHARED>, true>(call); }
