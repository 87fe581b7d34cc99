// out[row][c] = bf16(activation(gate, up)); columns from `width` to `stride` are zero. A kernel per activation:
//
//   swiglu_silu     silu(gate) * up, silu(x) = x / (1 + e^-x)
//   swiglu_gelu     gelu(gate) * up, gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
//   swiglu_clamped  (u + 1) g / (1 + e^(-1.702 g)), g = min(gate, 7), u = up within -7 and 7
//
// gate = gate_up[row][c] and up = gate_up[row][width + c]; for the last, they are gate_up[row][2 c] and the next.
//
// Mapping: a thread takes four neighbouring columns of one row (one by one where rows do not begin on 16 bytes);
// blocks along y are rows, so that a row of 28672 columns occupies 28 multiprocessors. Moves 8 + 2 bytes an output and
// computes one exponential and one division: bound by memory, designed for 85 % of its bandwidth with tens of rows.
// Has not yet run on a card.
#include "prelude.cuh"

constexpr float LOG2_E = 1.44269504f;

// x / (1 + e^-y). Where the exponential overflows, the quotient is zero, as it should.
DEVICE float times_sigmoid(float x, float y) { return __fdividef(x, 1.0f + exp2_approx(-y * LOG2_E)); }

struct Silu {
    static constexpr bool INTERLEAVED = false;
    static DEVICE float of(float gate, float up) { return times_sigmoid(gate, gate) * up; }
};

// (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y)).
struct Gelu {
    static constexpr bool INTERLEAVED = false;
    static DEVICE float of(float gate, float up) {
        constexpr float TWICE_ROOT_2_OVER_PI = 1.59576912f;
        return times_sigmoid(gate, TWICE_ROOT_2_OVER_PI * (gate + 0.044715f * gate * gate * gate)) * up;
    }
};

struct Clamped {
    static constexpr bool INTERLEAVED = true;
    static DEVICE float of(float gate, float up) {
        constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
        // Comparisons, since `fminf` would turn NaN into a number.
        float g = gate > LIMIT ? LIMIT : gate;
        float u = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
        return times_sigmoid(g, ALPHA * g) * (u + 1.0f);
    }
};

// Where a column's gate and up lie in a row of `2 * width`.
template <class Activation> DEVICE float at_column(const float* row, u32 width, u32 column) {
    if (Activation::INTERLEAVED) return Activation::of(row[2 * column], row[2 * column + 1]);
    return Activation::of(row[column], row[width + column]);
}

template <class Activation> DEVICE void four_columns(const float* row, u32 width, u32 column, bf16* out) {
    float4 v, w;
    if (Activation::INTERLEAVED) {
        float4 first = as_floats(load_once(row + 2 * column)), second = as_floats(load_once(row + 2 * column + 4));
        v = make_float4(first.x, first.z, second.x, second.z);
        w = make_float4(first.y, first.w, second.y, second.w);
    } else {
        v = as_floats(load_once(row + column));
        w = as_floats(load_once(row + width + column));
    }
    u32 low = pack_bf16(Activation::of(v.x, w.x), Activation::of(v.y, w.y));
    u32 high = pack_bf16(Activation::of(v.z, w.z), Activation::of(v.w, w.w));
    store_8(out + column, make_uint2(low, high));
}

template <class Activation>
DEVICE void activate(const float* gate_up, u32 width, u32 rows, bf16* out, u32 stride) {
    u32 first = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    // Rows of `2 * width` begin on 16 bytes where the width is even; so do their halves where it is a multiple of four.
    bool aligned = width % (Activation::INTERLEAVED ? 2 : 4) == 0;
    for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
        const float* from = gate_up + (u64)row * 2 * width;
        bf16* to = out + (u64)row * stride;
        if (aligned && first + 4 <= width) {
            four_columns<Activation>(from, width, first, to);
        } else {
            for (u32 column = first; column < min(stride, first + 4); column++)
                to[column] = column < width ? to_bf16(at_column<Activation>(from, width, column)) : bf16{0};
        }
    }
}

#define PARAMETERS (const float* __restrict__ gate_up, u32 width, u32 rows, bf16* __restrict__ out, u32 stride)

KERNEL(swiglu_silu, 256, 4, PARAMETERS) { activate<Silu>(gate_up, width, rows, out, stride); }
KERNEL(swiglu_gelu, 256, 4, PARAMETERS) { activate<Gelu>(gate_up, width, rows, out, stride); }
KERNEL(swiglu_clamped, 256, 4, PARAMETERS) { activate<Clamped>(gate_up, width, rows, out, stride); }
