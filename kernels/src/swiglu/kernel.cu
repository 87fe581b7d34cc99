// out[row][c] = bf16(silu(gate) * up), gate = gate_up[row][c], up = gate_up[row][width + c], silu(x) = x / (1 + e^-x);
// columns from `width` to `stride` are zero.
//
// Mapping: a thread takes four neighbouring columns of one row (one by one where the width is not a multiple of four);
// blocks along y are rows. Moves 8 + 2 bytes an output and computes one exponential and one division: bound by memory.
#include "prelude.cuh"

DEVICE float swiglu(float gate, float up) {
    constexpr float LOG2_E = 1.44269504f;
    return __fdividef(gate, 1.0f + exp2_approx(-gate * LOG2_E)) * up;
}

DEVICE void swiglu_four(const float* gate, const float* up, bf16* out) {
    uint4 g = load_16(gate), u = load_16(up);
    float a = swiglu(__uint_as_float(g.x), __uint_as_float(u.x));
    float b = swiglu(__uint_as_float(g.y), __uint_as_float(u.y));
    float c = swiglu(__uint_as_float(g.z), __uint_as_float(u.z));
    float d = swiglu(__uint_as_float(g.w), __uint_as_float(u.w));
    store_8(out, make_uint2(pack_bf16(a, b), pack_bf16(c, d)));
}

KERNEL(swiglu_bf16, 256, 4,
       (const float* __restrict__ gate_up, u32 width, u32 rows, bf16* __restrict__ out, u32 stride)) {
    u32 first = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
        const float* gate = gate_up + (u64)row * 2 * width;
        const float* up = gate + width;
        bf16* to = out + (u64)row * stride;
        if (width % 4 == 0 && first < width) {
            swiglu_four(gate + first, up + first, to + first);
        } else {
            for (u32 column = first; column < min(stride, first + 4); column++)
                to[column] = column < width ? to_bf16(swiglu(gate[column], up[column])) : bf16{0};
        }
    }
}
