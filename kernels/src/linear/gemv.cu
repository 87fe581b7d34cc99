// y[row][o] = sum over k of x[row][k] * weight[o][k] (+ bias[o]) for 1 to 8 rows: decode's largest share of time.
//
// Bound by memory: a weight is read once, 2 bytes for at most 16 operations. So the design serves one aim, to keep
// enough bytes under way. A card of 132 multiprocessors and 4.8 TB/s with some 700 ns from request to data needs 26 KB
// of them on each multiprocessor; here a thread has eight independent loads of 16 bytes under way, three blocks of 256
// threads 96 KB, and the two that share a multiprocessor where k is split 64 KB. Designed for 90 % of the memory's rate
// once a matrix is tens of megabytes; a matrix of a few megabytes ends before the first loads are paid off.
//
// Mapping: a block computes 16 outputs; blocks along y split k; the warps of a block take steps of 128 k in turn. The
// 16 weight rows are the A operand of the tensor core's 16 x 8 x 16 multiplication, the rows of x its 8 columns: no
// shuffles, no conversions. Weights never touch shared memory: a multiplication may number its k as it likes as long
// as both operands agree, so a lane loads 8 consecutive k of its two weight rows, and of its row of x, and feeds them
// to two multiplications. Eight lanes by four cover 64 bytes of each of 8 rows; the next load of the same step takes
// the other half of those 128-byte lines.
//
// x is at most 8 / 16 of the weights' bytes per block, but all blocks of a multiprocessor read the same x: it comes
// from L1, where weights are not kept.
//
// Order of summation: within a warp ascending k; warps ascending; splits ascending, summed by the block of a tile that
// arrives last. A column of the multiplication knows nothing of the others, so a row's bits are the same for 1 to 8
// rows.
//
// Not yet run on a card.
#include "prelude.cuh"

namespace gemv {

constexpr u32 OUTPUTS = 16, ROWS = 8, SUMS = OUTPUTS * ROWS;
constexpr u32 LOADS = 4, PER_LOAD = 32, STEP = LOADS * PER_LOAD;

// Where a lane's operands begin.
struct Lane {
    const bf16 *weight_upper, *weight_lower, *x;
    // First k of the lane in a load.
    u32 k;
};

// Outputs and rows that do not exist repeat the last that does: their sums are computed and not stored.
DEVICE Lane lane_of(const bf16* x, const bf16* weight, u32 rows, u32 outputs, u32 stride) {
    u32 group = lane_index() / 4, output = blockIdx.x * OUTPUTS + group;
    return {
        weight + (u64)min(output, outputs - 1) * stride,
        weight + (u64)min(output + 8, outputs - 1) * stride,
        x + (u64)min(group, rows - 1) * stride,
        lane_index() % 4 * 8,
    };
}

// Two multiplications of 16 k: a lane's first four k are the first one's, as they are in x.
DEVICE void multiply(float (&sums)[4], uint4 upper, uint4 lower, uint4 x) {
    multiply_16x8x16(sums, {upper.x, lower.x, upper.y, lower.y}, {x.x, x.y});
    multiply_16x8x16(sums, {upper.z, lower.z, upper.w, lower.w}, {x.z, x.w});
}

// One step. `WHOLE`: all of its k exist. Else what lies beyond `stride` counts as zero; rows are padded to 8 elements,
// so a load is there or not as a whole.
template <bool WHOLE> DEVICE void take_step(float (&sums)[4], const Lane& lane, u32 step, u32 stride) {
    uint4 upper[LOADS], lower[LOADS], x[LOADS];
#pragma unroll
    for (u32 load = 0; load < LOADS; load++) {
        u32 k = step * STEP + load * PER_LOAD + lane.k;
        bool exists = WHOLE || k < stride;
        upper[load] = exists ? load_once(lane.weight_upper + k) : make_uint4(0, 0, 0, 0);
        lower[load] = exists ? load_once(lane.weight_lower + k) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (u32 load = 0; load < LOADS; load++) {
        u32 k = step * STEP + load * PER_LOAD + lane.k;
        x[load] = WHOLE || k < stride ? load_16(lane.x + k) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (u32 load = 0; load < LOADS; load++) multiply(sums, upper[load], lower[load], x[load]);
}

// The warp's own share of the sums over k of [first, end) steps.
DEVICE void sum_of_warp(float (&sums)[4], const Lane& lane, u32 first, u32 end, u32 stride) {
    u32 whole = min(end, stride / STEP), step = first + warp_index(), warps = blockDim.x / WARP;
    for (; step < whole; step += warps) take_step<true>(sums, lane, step, stride);
    if (step < end) take_step<false>(sums, lane, step, stride);
}

// Sum `at` of the block's tile (row-major, 16 outputs a row) over its warps, each of which left its own in `shared`.
DEVICE float sum_of_block(const float* shared, u32 at) {
    float sum = shared[at];
    for (u32 warp = 1; warp < blockDim.x / WARP; warp++) sum += shared[warp * SUMS + at];
    return sum;
}

DEVICE void leave_sums(float* shared, const float (&sums)[4]) {
    float* own = shared + warp_index() * SUMS;
    u32 output = lane_index() / 4, row = lane_index() % 4 * 2;
    own[row * OUTPUTS + output] = sums[0];
    own[(row + 1) * OUTPUTS + output] = sums[1];
    own[row * OUTPUTS + output + 8] = sums[2];
    own[(row + 1) * OUTPUTS + output + 8] = sums[3];
}

} // namespace gemv

// Blocks: x, 16 outputs each; y, `steps_per_split` steps of 128 k each. Shared memory: 512 bytes a warp. With more than
// one split, `partials` holds 128 sums for each block and `arrivals` a zero for each 16 outputs, which is zero again
// afterwards. `bias` may be null.
// dynamic shared memory: linear_gemv 4096 bytes
KERNEL(linear_gemv, 256, 3,
       (const bf16* __restrict__ x, const bf16* __restrict__ weight, const float* __restrict__ bias, float* y,
        float* partials, u32* arrivals, u32 rows, u32 outputs, u32 stride, u32 steps_per_split)) {
    using namespace gemv;
    float* shared = shared_memory<float>();
    u32 splits = gridDim.y, first = blockIdx.y * steps_per_split;
    u32 end = min(first + steps_per_split, divide_up(stride, STEP));

    float sums[4] = {};
    sum_of_warp(sums, lane_of(x, weight, rows, outputs, stride), first, end, stride);
    leave_sums(shared, sums);
    __syncthreads();

    float* tile = partials + (u64)blockIdx.x * splits * SUMS;
    if (splits > 1) {
        for (u32 at = threadIdx.x; at < SUMS; at += blockDim.x) tile[blockIdx.y * SUMS + at] = sum_of_block(shared, at);
        if (!block_arrives_last(arrivals + blockIdx.x, splits)) return;
    }
    for (u32 at = threadIdx.x; at < SUMS; at += blockDim.x) {
        u32 row = at / OUTPUTS, output = blockIdx.x * OUTPUTS + at % OUTPUTS;
        if (row >= rows || output >= outputs) continue;
        float sum = splits > 1 ? tile[at] : sum_of_block(shared, at);
        for (u32 split = 1; split < splits; split++) sum += tile[split * SUMS + at];
        y[(u64)row * outputs + output] = bias ? sum + bias[output] : sum;
    }
}
