// y[row][o] = sum over k of x[row][k] * weight[o][k] (+ bias[o]) for any number of rows.
//
// Mapping: a block computes a tile of outputs x rows; blocks along x are tiles, rows fastest, so that the blocks at
// work share weights in L2; blocks along y may split k. A block walks k in steps of 64. Its copies run STAGES - 1 steps
// ahead (cp.async, 16 bytes each) into a ring in shared memory, where the eight 16-byte chunks of a row lie XORed with
// the row's number: both the copies and `load_matrices` touch all banks evenly.
//
// Weights are the A operand (16 outputs) and rows of x the B operand (8 columns) of the tensor core's 16 x 8 x 16
// multiplication in every class of tiles, so a tile may have as few as 8 rows, and all classes compute a sum in the
// same order: ascending k, 16 at a time, with the same splits. A row's bits do not depend on the class.
//
// | class | outputs x rows | warps, each | stages | shared memory | bound by               |
// |-------|----------------|-------------|--------|---------------|------------------------|
// | 8     |  64 x 8        | 4, 16 x 8   | 6      | 54 KB         | memory                 |
// | 16    |  64 x 16       | 4, 16 x 16  | 6      | 60 KB         | memory                 |
// | 32    |  64 x 32       | 4, 16 x 32  | 6      | 72 KB         | memory                 |
// | 64    | 128 x 64       | 4, 64 x 32  | 4      | 96 KB         | memory to tensor cores |
// | 128   | 128 x 128      | 8, 64 x 32  | 3      | 96 KB         | tensor cores           |
//
// A block moves 2 (outputs + rows) bytes for each k and adds outputs x rows products. Classes of up to 32 rows have
// 40 KB of weights under way in a block and two to four blocks on an H100's multiprocessor: designed for 85 % of the
// memory's rate. In the large ones a warp reads 6 KB of shared memory for 32 multiplications, about as fast as an A100
// or H100 carries those out by mma.sync: designed for 70 % of an A100's peak and 45 % of an H100's, whose wgmma this
// does not use.
//
// Splits of k: either each block takes one and the last to arrive at a tile adds their sums in order, or as many
// launches add one each to y. Both give the same bits.
//
// Not yet run on a card.
#include "prelude.cuh"

namespace gemm {

constexpr u32 STEP = 64, CHUNK = 8, CHUNKS = STEP / CHUNK;

// A block's tile: WARPS_O x WARPS_R warps, each with OUTPUTS_16 x ROWS_8 multiplications side by side.
template <u32 WARPS_O_, u32 WARPS_R, u32 OUTPUTS_16_, u32 ROWS_8_, u32 STAGES_> struct Tile {
    static constexpr u32 WARPS_O = WARPS_O_, OUTPUTS_16 = OUTPUTS_16_, ROWS_8 = ROWS_8_, STAGES = STAGES_;
    static constexpr u32 THREADS = WARPS_O * WARPS_R * WARP;
    static constexpr u32 WARP_OUTPUTS = OUTPUTS_16 * 16, WARP_ROWS = ROWS_8 * 8;
    static constexpr u32 OUTPUTS = WARPS_O * WARP_OUTPUTS, ROWS = WARPS_R * WARP_ROWS;
    // Elements of one stage: weights, then x.
    static constexpr u32 STAGE = (OUTPUTS + ROWS) * STEP;
};

using Tile8 = Tile<4, 1, 1, 1, 6>;
using Tile16 = Tile<4, 1, 1, 2, 6>;
using Tile32 = Tile<4, 1, 1, 4, 6>;
using Tile64 = Tile<2, 2, 4, 4, 4>;
using Tile128 = Tile<2, 4, 4, 4, 3>;

struct Problem {
    const bf16 *x, *weight;
    const float* bias;
    float *y, *partials;
    u32* arrivals;
    u32 rows, outputs, stride, steps_per_split, first_split;
};

// A warp's sums, by multiplication and by `d` of that.
template <class T> struct Sums {
    float of[T::OUTPUTS_16][T::ROWS_8][4];

    DEVICE void fill(float value) {
#pragma unroll
        for (u32 o = 0; o < T::OUTPUTS_16; o++)
#pragma unroll
            for (u32 r = 0; r < T::ROWS_8; r++)
#pragma unroll
                for (u32 d = 0; d < 4; d++) of[o][r][d] = value;
    }
};

// First output and first row of the block's tile, and of the warp's part.
template <class T> struct Place {
    u32 output, row, warp_output, warp_row;

    DEVICE explicit Place(u32 rows) {
        u32 row_tiles = divide_up(rows, T::ROWS);
        output = blockIdx.x / row_tiles * T::OUTPUTS;
        row = blockIdx.x % row_tiles * T::ROWS;
        warp_output = warp_index() % T::WARPS_O * T::WARP_OUTPUTS;
        warp_row = warp_index() / T::WARPS_O * T::WARP_ROWS;
    }
};

// ---- From global to shared memory ----

// Where a chunk lies in a tile of 64 columns.
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * STEP + (chunk ^ row % 8) * CHUNK; }

// One operand's way into the ring: `rows` of `stride` elements each, of which the thread copies one chunk of every
// so many rows of the tile.
struct Source {
    // The thread's chunk of its first row, in the step to be copied next.
    const bf16* chunk;
    // How many rows exist from the thread's first on; none or less where that is beyond the matrix.
    i32 rows;

    DEVICE Source(const bf16* matrix, u32 first, u32 rows, u32 stride, u32 step)
        : chunk(matrix + (u64)(first + threadIdx.x / CHUNKS) * stride + step * STEP + threadIdx.x % CHUNKS * CHUNK),
          rows((i32)(rows - first - threadIdx.x / CHUNKS)) {}
};

// Starts the copy of the next 64 columns of `ROWS` rows. Zeros stand for rows that do not exist, and for columns that
// do not, as `inside` says.
template <u32 ROWS, u32 THREADS> DEVICE void copy_rows(bf16* tile, Source& source, u32 stride, bool inside) {
    constexpr u32 AT_ONCE = THREADS / CHUNKS;
    u32 row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (u32 pass = 0; pass < ROWS; pass += AT_ONCE) {
        if (ROWS < AT_ONCE && row >= ROWS) break;
        copy_async_16(tile + swizzled(row, chunk) + pass * STEP, source.chunk + (u64)(pass * stride),
                      inside && (i32)pass < source.rows);
    }
    source.chunk += STEP;
}

template <class T> DEVICE void copy_step(bf16* stage, Source& weight, Source& x, u32 stride, u32 step) {
    static_assert(T::THREADS / CHUNKS % 8 == 0, "all rows of a thread have one swizzle");
    bool inside = step * STEP + threadIdx.x % CHUNKS * CHUNK < stride;
    copy_rows<T::OUTPUTS, T::THREADS>(stage, weight, stride, inside);
    copy_rows<T::ROWS, T::THREADS>(stage + T::OUTPUTS * STEP, x, stride, inside);
}

// ---- From shared memory through the tensor cores ----

// 16 outputs by 16 k from `chunk` on: outputs 0-7 and 8-15 of the first chunk, then of the second.
DEVICE void load_weights(u32 (&out)[4], const bf16* tile, u32 first, u32 chunk) {
    u32 matrix = lane_index() / 8;
    load_matrices(out, tile + swizzled(first + matrix % 2 * 8 + lane_index() % 8, chunk + matrix / 2));
}

// 8 rows by 32 k from `chunk` on: four chunks.
DEVICE void load_x(u32 (&out)[4], const bf16* tile, u32 first, u32 chunk) {
    load_matrices(out, tile + swizzled(first + lane_index() % 8, chunk + lane_index() / 8));
}

// 64 k for all of a warp's multiplications. Weights are loaded when they are used, for want of registers.
template <class T> DEVICE void multiply_step(Sums<T>& sums, const bf16* stage, const Place<T>& place) {
    const bf16* x_tile = stage + T::OUTPUTS * STEP;
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; chunk += 4) {
        u32 x[T::ROWS_8][4];
#pragma unroll
        for (u32 r = 0; r < T::ROWS_8; r++) load_x(x[r], x_tile, place.warp_row + r * 8, chunk);
#pragma unroll
        for (u32 half = 0; half < 4; half += 2)
#pragma unroll
            for (u32 o = 0; o < T::OUTPUTS_16; o++) {
                u32 weights[4];
                load_weights(weights, stage, place.warp_output + o * 16, chunk + half);
#pragma unroll
                for (u32 r = 0; r < T::ROWS_8; r++)
                    multiply_16x8x16(sums.of[o][r], weights, {x[r][half], x[r][half + 1]});
            }
    }
}

// ---- Out ----

// Writes the warp's sums to y, or adds them to what is there. Lanes of the same `lane / 4` write 8 neighbours.
template <class T> DEVICE void write_sums(const Sums<T>& sums, const Problem& problem, const Place<T>& place) {
    u32 output = place.output + place.warp_output + lane_index() / 4;
    u32 first_row = place.row + place.warp_row + lane_index() % 4 * 2;
#pragma unroll
    for (u32 r = 0; r < T::ROWS_8 * 2; r++) {
        u32 row = first_row + r / 2 * 8 + r % 2;
        if (row >= problem.rows) break;
        float* y = problem.y + (u64)row * problem.outputs + output;
#pragma unroll
        for (u32 o = 0; o < T::OUTPUTS_16 * 2; o++) {
            if (output + o * 8 >= problem.outputs) break;
            float sum = sums.of[o / 2][r / 2][o % 2 * 2 + r % 2];
            if (problem.first_split > 0) sum = y[o * 8] + sum;
            if (problem.bias) sum += problem.bias[output + o * 8];
            y[o * 8] = sum;
        }
    }
}

// The block's place for its sums among those of all splits of its tile: 16 bytes of each thread side by side.
template <class T> DEVICE float* partials_of(const Problem& problem, u32 split) {
    constexpr u32 SUMS = T::OUTPUTS * T::ROWS;
    return problem.partials + ((u64)blockIdx.x * gridDim.y + split) * SUMS + threadIdx.x * 4;
}

template <class T> DEVICE void leave_partials(const Sums<T>& sums, const Problem& problem) {
    float* to = partials_of<T>(problem, blockIdx.y);
#pragma unroll
    for (u32 o = 0; o < T::OUTPUTS_16; o++)
#pragma unroll
        for (u32 r = 0; r < T::ROWS_8; r++) {
            auto& d = sums.of[o][r];
            store_16(to + (o * T::ROWS_8 + r) * T::THREADS * 4,
                     make_uint4(__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]),
                                __float_as_uint(d[3])));
        }
}

// The sums of all splits, ascending. They are added to -0, which changes none.
template <class T> DEVICE void add_partials(Sums<T>& sums, const Problem& problem) {
    sums.fill(-0.0f);
#pragma unroll 1
    for (u32 split = 0; split < gridDim.y; split++) {
        const float* from = partials_of<T>(problem, split);
#pragma unroll
        for (u32 o = 0; o < T::OUTPUTS_16; o++)
#pragma unroll
            for (u32 r = 0; r < T::ROWS_8; r++) {
                uint4 part = load_16(from + (o * T::ROWS_8 + r) * T::THREADS * 4);
                sums.of[o][r][0] += __uint_as_float(part.x);
                sums.of[o][r][1] += __uint_as_float(part.y);
                sums.of[o][r][2] += __uint_as_float(part.z);
                sums.of[o][r][3] += __uint_as_float(part.w);
            }
    }
}

// ---- A block ----

template <class T> DEVICE void run(const Problem& problem) {
    Place<T> place(problem.rows);
    bf16* ring = shared_memory<bf16>();
    auto stage_of = [&](u32 turn) { return ring + turn % T::STAGES * T::STAGE; };

    u32 begin = (problem.first_split + blockIdx.y) * problem.steps_per_split;
    u32 end = min(begin + problem.steps_per_split, divide_up(problem.stride, STEP));
    Source weight(problem.weight, place.output, problem.outputs, problem.stride, begin);
    Source x(problem.x, place.row, problem.rows, problem.stride, begin);
    auto copy = [&](u32 step) { copy_step<T>(stage_of(step - begin), weight, x, problem.stride, step); };

    Sums<T> sums;
    sums.fill(0.0f);
#pragma unroll
    for (u32 ahead = 0; ahead < T::STAGES - 1; ahead++) {
        if (begin + ahead < end) copy(begin + ahead);
        copy_commit();
    }
    for (u32 step = begin; step < end; step++) {
        // The step's copies have landed, and all warps are done with the stage that the next copies go to.
        copy_wait<T::STAGES - 2>();
        __syncthreads();
        u32 next = step + T::STAGES - 1;
        if (next < end) copy(next);
        copy_commit();
        multiply_step<T>(sums, stage_of(step - begin), place);
    }

    if (gridDim.y > 1) {
        leave_partials<T>(sums, problem);
        if (!block_arrives_last(problem.arrivals + blockIdx.x, gridDim.y)) return;
        add_partials<T>(sums, problem);
    }
    write_sums<T>(sums, problem, place);
}

} // namespace gemm

// Blocks: x, tiles, rows fastest; y, splits of `steps_per_split` steps of 64 k, from split `first_split` on. With more
// than one along y, which are then all splits, `partials` holds a tile of sums for each block and `arrivals` a zero for
// each tile, which is zero again afterwards. With one, a launch whose `first_split` is not 0 adds to y. `bias` may be
// null. Shared memory: STAGES x 128 (outputs + rows) bytes.
#define LINEAR_GEMM(tile_rows, blocks)                                                                             \
    KERNEL(linear_gemm_##tile_rows, gemm::Tile##tile_rows::THREADS, blocks,                                        \
           (const bf16* x, const bf16* weight, const float* bias, float* y, float* partials, u32* arrivals,        \
            u32 rows, u32 outputs, u32 stride, u32 steps_per_split, u32 first_split)) {                            \
        gemm::run<gemm::Tile##tile_rows>({x, weight, bias, y, partials, arrivals, rows, outputs, stride,           \
                                          steps_per_split, first_split});                                          \
    }

// dynamic shared memory: linear_gemm_8 55296 bytes
// dynamic shared memory: linear_gemm_16 61440 bytes
// dynamic shared memory: linear_gemm_32 73728 bytes
// dynamic shared memory: linear_gemm_64 98304 bytes
// dynamic shared memory: linear_gemm_128 98304 bytes
LINEAR_GEMM(8, 3)
LINEAR_GEMM(16, 3)
LINEAR_GEMM(32, 3)
LINEAR_GEMM(64, 2)
LINEAR_GEMM(128, 2)
