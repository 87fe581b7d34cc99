// out[i][c] = table[tokens[i] - first][c] as float, zero where the table has no such row. A token whose top bit is set
// is an index into `drawn`, which holds the token: one that an earlier launch drew and the host does not know yet.
//
// Mapping: a thread takes eight neighbouring columns of one row: one 16-byte load, two 16-byte stores (element by
// element where the width is no multiple of four). Blocks along x share the columns, blocks along y are rows, so that
// a single row of 8192 columns occupies eight multiprocessors.
//
// Moves 2 + 4 bytes an output and computes nothing: bound by memory, designed for 90 % of its bandwidth with hundreds
// of rows. A few rows take as long as two dependent reads, the token's and the row's; three for a drawn one. Has not
// yet run on a card.
#include "prelude.cuh"

constexpr u32 COLUMNS = 8;
constexpr u32 DRAWN = 0x80000000u;
constexpr u32 NO_TOKEN = 0xffffffffu;

DEVICE void store_eight(float* out, const float (&value)[COLUMNS], u32 columns, bool aligned) {
    if (aligned) {
        store_16(out, as_bits(make_float4(value[0], value[1], value[2], value[3])));
        if (columns > 4) store_16(out + 4, as_bits(make_float4(value[4], value[5], value[6], value[7])));
        return;
    }
#pragma unroll
    for (u32 at = 0; at < COLUMNS; at++)
        if (at < columns) out[at] = value[at];
}

KERNEL(embedding_bf16, 128, 8,
       (const u32* __restrict__ tokens, const u32* __restrict__ drawn, u32 drawn_count, const bf16* __restrict__ table,
        u32 table_rows, u32 table_stride, u32 first, float* __restrict__ out, u32 rows, u32 width)) {
    u32 column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
    if (column >= width) return;
    for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
        u32 token = tokens[row];
        if (token & DRAWN) {
            u32 at = token & ~DRAWN;
            token = at < drawn_count ? drawn[at] : NO_TOKEN;
        }
        // An id below `first` wraps to one beyond every table, and no table reaches to `NO_TOKEN`.
        u32 local = token - first;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (local < table_rows) v = load_once(table + (u64)local * table_stride + column);
        float value[COLUMNS] = {low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y),
                                low_half(v.z), high_half(v.z), low_half(v.w), high_half(v.w)};
        store_eight(out + (u64)row * width + column, value, width - column, width % 4 == 0);
    }
}
