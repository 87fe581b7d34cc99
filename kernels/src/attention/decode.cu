// out = softmax(scale · q Kᵀ) V for sequences with one new token each, over paged keys and values.
//
// Mapping: a block takes one sequence, one KV head (up to 16 of its query heads, the rows of one matrix tile) and one
// chunk of keys, aligned to absolute positions. Four warps share each tile of 64 keys (32 for the widest heads): 16
// keys a warp while they compute scores, a quarter of the head while they add values; weights and maxima pass through
// shared memory. Pages come in by 16-byte asynchronous copies, STAGES - 1 tiles ahead, keys and values waited for
// apart. A sequence of one chunk is written at once, others leave partial sums that `attention_merge` joins.
//
// Moves 4 padded_dim bytes a key and KV head, once, and does 4 padded_dim operations on them per query head: for groups
// of up to 16 it is bound by memory. Designed for 85 % of the bandwidth on long contexts: three blocks fit on a
// multiprocessor of Hopper (two at d = 256, by registers) and keep 68 to 166 KB in flight, where 3.35 TB/s at 700 ns
// ask for 18 KB, 4.8 TB/s for 26. Padding of a head's dimensions to DIM costs no traffic. It has not yet run on a card.
#include "prelude.cuh"
#include "attention.cuh"

// Leaves a chunk's sums for `attention_merge`.
template <class L> DEVICE void store_partial(const Call& call, const RowTile& rows, u32 partial, const Sums<L>& sums) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = L::lane_row() + 8 * half;
        if (!rows.holds(row)) continue;
        u64 place = (u64)partial * call.query_heads + rows.query_head(row);
        float* values = call.partials + place * call.padded_dim;
        u32 first_dim = L::share() * L::WARP_DIMS + lane_index() % 4 * 2;
#pragma unroll
        for (u32 tile = 0; tile < L::DIM_TILES; tile++) {
            u32 dim = first_dim + tile * 8;
            if (dim < call.padded_dim)
                store_8(values + dim, make_uint2(__float_as_uint(sums.values[tile][2 * half]),
                                                 __float_as_uint(sums.values[tile][2 * half + 1])));
        }
        if (L::share() == 0 && lane_index() % 4 == 0)
            store_8(call.partials + call.partial_elements + place * 2,
                    make_uint2(__float_as_uint(sums.maximum[half]), __float_as_uint(sums.weights[2 * half])));
    }
}

// Chunks that a sequence's last row sees.
struct Chunks {
    u32 start, stop, first, count;
};

DEVICE Chunks chunks_of(const Call& call, u32 context) {
    if (context == 0) return {0, 0, 0, 0};
    u32 start = first_key_seen(context - 1, call.window), first = start / call.chunk;
    return {start, context, first, (context - 1) / call.chunk + 1 - first};
}

template <class L> DEVICE void decode(const Call& call) {
    Span span = span_at(call, blockIdx.z);
    Chunks chunks = chunks_of(call, span.context);
    u32 kv_head = blockIdx.y / call.row_tiles, first = blockIdx.y % call.row_tiles * L::ROWS;
    RowTile rows = row_tile(call, span, kv_head, first);
    if (blockIdx.x >= chunks.count || first >= rows.pairs) return;
    u32 from = (chunks.first + blockIdx.x) * call.chunk;
    Sums<L> sums;
    attend<L, false>(call, rows, kv_head, max(from, chunks.start), min(from + call.chunk, chunks.stop), sums);
    if (chunks.count == 1)
        store_rows(call, rows, sums);
    else
        store_partial(call, rows, call.work[blockIdx.z] + blockIdx.x, sums);
}

// dynamic shared memory: attention_decode_d64 76288 bytes
// dynamic shared memory: attention_decode_d96 56576 bytes
// dynamic shared memory: attention_decode_d128 73984 bytes
// dynamic shared memory: attention_decode_d256 76032 bytes
KERNEL(attention_decode_d64, 128, 3, (Call call)) { decode<Layout<64, 1, 4, 4>>(call); }
KERNEL(attention_decode_d96, 128, 3, (Call call)) { decode<Layout<96, 1, 4, 2>>(call); }
KERNEL(attention_decode_d128, 128, 3, (Call call)) { decode<Layout<128, 1, 4, 2>>(call); }
KERNEL(attention_decode_d256, 128, 2, (Call call)) { decode<Layout<256, 1, 4, 2>>(call); }

// Joins a sequence's partial sums left to right, then the sink. Mapping: a block is one query head (x) of one sequence
// (y), a thread two of its dimensions. Reads 4 padded_dim + 8 bytes a partial, all of it in the L2 as a rule.
KERNEL(attention_merge, 128, 8, (Call call)) {
    Span span = span_at(call, blockIdx.y);
    Chunks chunks = chunks_of(call, span.context);
    u32 head = blockIdx.x, dim = threadIdx.x * 2;
    if (chunks.count <= 1 || dim >= call.padded_dim) return;
    float maximum = minus_infinity(), weights = 0.0f, values[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (u32 at = 0; at < chunks.count; at++) {
        u64 place = (u64)(call.work[blockIdx.y] + at) * call.query_heads + head;
        uint2 scalars = load_8(call.partials + call.partial_elements + place * 2);
        uint2 pair = load_8(call.partials + place * call.padded_dim + dim);
        Factors factors = join_maxima(maximum, __uint_as_float(scalars.x));
        weights = join(weights, __uint_as_float(scalars.y), factors);
        values[0] = join(values[0], __uint_as_float(pair.x), factors);
        values[1] = join(values[1], __uint_as_float(pair.y), factors);
    }
    float factor = output_factor(maximum, weights, sink_of(call, head));
    bf16* out = call.out + (u64)span.row * call.out_stride;
    if (dim < call.head_dim)
        store_4(out + head * call.head_dim + dim,
                pack_bf16(output_of(values[0], factor), output_of(values[1], factor)));
    u32 padding = call.query_heads * call.head_dim + threadIdx.x;
    if (head + 1 == call.query_heads && padding < call.out_stride) out[padding] = bf16{0};
}
