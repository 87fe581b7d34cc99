// residual += delta (where there is one), then
// out[r][c] = bf16(bf16(residual[r][c] / sqrt(mean(residual[r]^2) + eps)) * weight[c]),
// and columns from `width` to `stride` are zero.
//
// Where `rows_of` is given, row r of `out` comes from row rows_of[r] of `residual` and `delta`, and `residual` stays
// as it is: the last norm of a model, of those rows only that become logits. A number that is no row makes zeros.
//
// Mapping: a block per row. `rms_norm_1`, `_2` and `_4` hold the row in registers, that many vectors of four columns a
// thread, and read it once: widths that are multiples of four up to 2048, 4096 and 16384. `rms_norm_wide` reads wider
// rows twice, `rms_norm_ragged` those that are no multiple of four, element by element. The number of threads follows
// from the width alone, and with it the order of the sum: a thread's own columns ascending, then `block_sum`.
//
// Moves 4 + 4 + 4 + 2 bytes an element (residual read and written, delta, out), half of it in L2 in a decode step, for
// four operations: bound by memory, designed for 85 % of its bandwidth with 264 rows or more; a single row is bound by
// one multiprocessor's reads, all of which are under way at once, and two barriers. Has not yet run on a card.
#include "prelude.cuh"

#define PARAMETERS                                                                                                     \
    (float* __restrict__ residual, const float* __restrict__ delta, const u32* __restrict__ rows_of, u32 source_rows,  \
     const float* __restrict__ weight, float eps, bf16* __restrict__ out, u32 width, u32 stride)
#define THIS_ROW row_of_block(residual, delta, rows_of, source_rows, weight, eps, out, width, stride)

// What a block works on.
struct Row {
    float* residual;
    const float* delta;
    const float* weight;
    bf16* out;
    float eps;
    u32 width, stride;
    bool exists, kept_as_is;
};

DEVICE Row row_of_block(float* residual, const float* delta, const u32* rows_of, u32 source_rows, const float* weight,
                        float eps, bf16* out, u32 width, u32 stride) {
    u32 source = rows_of ? rows_of[blockIdx.x] : blockIdx.x;
    u64 at = (u64)source * width;
    return {residual + at, delta ? delta + at : nullptr, weight, out + (u64)blockIdx.x * stride, eps, width, stride,
            source < source_rows, rows_of != nullptr};
}

DEVICE void zero_columns(const Row& row, u32 from) {
    for (u32 column = from + threadIdx.x; column < row.stride; column += blockDim.x) row.out[column] = bf16{0};
}

// The factor that brings the row to a mean square of one, from each thread's share of the sum.
DEVICE float scale_of(const Row& row, float squares) {
    return rsqrtf(block_sum(squares, shared_memory<float>()) / row.width + row.eps);
}

DEVICE float4 load_four(const float* from) { return as_floats(load_16(from)); }

DEVICE float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Column by column: `all_reduce_rms_norm` adds in this order, too.
DEVICE float plus_squares(float sum, float4 x) {
    return plus_square(plus_square(plus_square(plus_square(sum, x.x), x.y), x.z), x.w);
}

// Two rounded numbers, each the rounded product of a rounded normal and its weight.
DEVICE u32 normalised(float x, float y, float scale, float weight_x, float weight_y) {
    u32 normal = pack_bf16(x * scale, y * scale);
    return pack_bf16(low_half(normal) * weight_x, high_half(normal) * weight_y);
}

DEVICE void store_normalised(bf16* out, float4 x, float scale, float4 weight) {
    u32 low = normalised(x.x, x.y, scale, weight.x, weight.y);
    u32 high = normalised(x.z, x.w, scale, weight.z, weight.w);
    store_8(out, make_uint2(low, high));
}

// The thread's vectors of a row in global memory, all reads under way at once; zeros beyond the row.
template <int VECTORS, class Load> DEVICE void load_vectors(float4 (&to)[VECTORS], u32 width, Load load) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        u32 column = (v * blockDim.x + threadIdx.x) * 4;
        to[v] = column < width ? load(column) : make_float4(0, 0, 0, 0);
    }
}

// The thread's vectors of the sum of residual and delta, which becomes the residual.
template <int VECTORS> DEVICE void load_sums(float4 (&x)[VECTORS], const Row& row) {
    load_vectors(x, row.width, [&](u32 column) { return load_four(row.residual + column); });
    if (!row.delta) return;
    float4 delta[VECTORS];
    load_vectors(delta, row.width, [&](u32 column) { return as_floats(load_once(row.delta + column)); });
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        u32 column = (v * blockDim.x + threadIdx.x) * 4;
        x[v] = sum_of(x[v], delta[v]);
        if (!row.kept_as_is && column < row.width) store_16(row.residual + column, as_bits(x[v]));
    }
}

// A row of at most `VECTORS * blockDim.x` vectors. The weights arrive while the threads add up.
template <int VECTORS> DEVICE void norm_in_registers(const Row& row) {
    if (!row.exists) return zero_columns(row, 0);
    float4 x[VECTORS], weight[VECTORS];
    load_sums(x, row);
    load_vectors(weight, row.width, [&](u32 column) { return load_four(row.weight + column); });
    float squares = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) squares = plus_squares(squares, x[v]);
    float scale = scale_of(row, squares);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        u32 column = (v * blockDim.x + threadIdx.x) * 4;
        if (column < row.width) store_normalised(row.out + column, x[v], scale, weight[v]);
    }
    zero_columns(row, row.width);
}

// Vectors of four columns and single columns, for a row that is read twice.
struct Four {
    using Value = float4;
    static constexpr u32 COLUMNS = 4;
    static DEVICE float4 load(const float* from) { return load_four(from); }
    static DEVICE void store(float* to, float4 value) { store_16(to, as_bits(value)); }
    static DEVICE float4 add(float4 a, float4 b) { return sum_of(a, b); }
    static DEVICE float plus(float sum, float4 x) { return plus_squares(sum, x); }
    static DEVICE void finish(bf16* to, float4 x, float scale, float4 weight) {
        store_normalised(to, x, scale, weight);
    }
};

struct One {
    using Value = float;
    static constexpr u32 COLUMNS = 1;
    static DEVICE float load(const float* from) { return *from; }
    static DEVICE void store(float* to, float value) { *to = value; }
    static DEVICE float add(float a, float b) { return a + b; }
    static DEVICE float plus(float sum, float x) { return plus_square(sum, x); }
    static DEVICE void finish(bf16* to, float x, float scale, float weight) {
        *to = to_bf16(to_float(to_bf16(x * scale)) * weight);
    }
};

template <class Unit> DEVICE typename Unit::Value load_sum(const Row& row, u32 column, bool with_delta) {
    typename Unit::Value x = Unit::load(row.residual + column);
    return with_delta ? Unit::add(x, Unit::load(row.delta + column)) : x;
}

template <class Unit> DEVICE void norm_twice_read(const Row& row) {
    if (!row.exists) return zero_columns(row, 0);
    u32 first = threadIdx.x * Unit::COLUMNS, step = blockDim.x * Unit::COLUMNS;
    bool adds = row.delta != nullptr;
    float squares = 0;
#pragma unroll 4
    for (u32 column = first; column < row.width; column += step) {
        typename Unit::Value x = load_sum<Unit>(row, column, adds);
        if (adds && !row.kept_as_is) Unit::store(row.residual + column, x);
        squares = Unit::plus(squares, x);
    }
    float scale = scale_of(row, squares);
    // What a thread wrote itself it may read without a barrier.
    bool adds_again = adds && row.kept_as_is;
#pragma unroll 4
    for (u32 column = first; column < row.width; column += step) {
        typename Unit::Value x = load_sum<Unit>(row, column, adds_again);
        Unit::finish(row.out + column, x, scale, Unit::load(row.weight + column));
    }
    zero_columns(row, row.width);
}

// dynamic shared memory: rms_norm_* 128 bytes
KERNEL(rms_norm_1, 512, 2, PARAMETERS) { norm_in_registers<1>(THIS_ROW); }
KERNEL(rms_norm_2, 512, 2, PARAMETERS) { norm_in_registers<2>(THIS_ROW); }
KERNEL(rms_norm_4, 1024, 1, PARAMETERS) { norm_in_registers<4>(THIS_ROW); }
KERNEL(rms_norm_wide, 1024, 1, PARAMETERS) { norm_twice_read<Four>(THIS_ROW); }
KERNEL(rms_norm_ragged, 1024, 1, PARAMETERS) { norm_twice_read<One>(THIS_ROW); }
