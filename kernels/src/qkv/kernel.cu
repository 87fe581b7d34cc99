// Bias, norm, rotation and rounding of the heads of a row, and where they go: `mod.rs` has the contract.
//
// Mapping: a part of a warp (8, 16 or 32 lanes for heads up to 64, 128 and 256 wide) per row and head, eight columns a
// lane. A lane's columns are two vectors of four that turn together: columns (i, half + i) of a half-split head, eight
// neighbours of an interleaved one. So a head stays in registers from one 16-byte load to one store, the norm's sum is
// a few shuffles in fixed order, and all reads of a lane are under way at once. Blocks of four warps: one row of 80
// heads of 128 occupies ten multiprocessors. `qkv_any` takes heads and rotations that are no multiple of eight, a warp
// per head, element by element.
//
// Moves 4 + 2 bytes an element (and 4 bytes a pair and row for angles, from L1 but for the first head), for some
// twenty operations: bound by memory, designed for 85 % of its bandwidth with hundreds of rows; a few rows are bound
// by one dependent chain of read, norm and store, an estimated 2 us. Has not yet run on a card.
#include "prelude.cuh"

// What every head shares; passed by value.
struct Shape {
    u32 rows, query_heads, kv_heads, dim, padded_dim;
    // Turning pairs of a head, and which dimensions make one.
    u32 half, interleaved;
    u32 block_size, slots;
    float eps;
};

struct Inputs {
    const float *x, *bias, *query_norm, *key_norm, *cos, *sin;
    const u32* slots;
};

// One head of one row.
struct Head {
    const float *x, *bias, *norm, *cos, *sin;
    u32 row, number, slot;
    bool exists, is_query, is_value;

    DEVICE bool turns() const { return !is_value; }
};

// Head number `task` of all rows. Beyond the last there is none to write: its lanes repeat the last one, since their
// warp waits for them.
DEVICE Head head_of_task(const Inputs& in, const Shape& s, u32 task) {
    u32 heads = s.query_heads + 2 * s.kv_heads;
    Head h;
    h.exists = task < s.rows * heads;
    u32 at = h.exists ? task : s.rows * heads - 1;
    h.row = at / heads;
    h.number = at % heads;
    h.slot = in.slots[h.row];
    h.is_query = h.number < s.query_heads;
    h.is_value = h.number >= s.query_heads + s.kv_heads;
    h.x = in.x + (u64)at * s.dim;
    h.bias = in.bias ? in.bias + h.number * s.dim : nullptr;
    h.norm = h.is_query ? in.query_norm : in.key_norm;
    h.cos = in.cos + (u64)h.row * s.half;
    h.sin = in.sin + (u64)h.row * s.half;
    return h;
}

// Where a head goes; null where it does not exist or its row has no slot. To be asked late, since it waits for the
// slot.
DEVICE bf16* place_of(const Head& head, const Shape& s, bf16* queries, bf16* pages) {
    if (!head.exists) return nullptr;
    if (head.is_query) return queries + ((u64)head.row * s.query_heads + head.number) * s.padded_dim;
    if (head.slot >= s.slots) return nullptr;
    u32 kv_head = (head.number - s.query_heads) % s.kv_heads;
    u64 heads_before = (u64)(head.slot / s.block_size) * s.kv_heads + kv_head;
    u64 tokens_before = (heads_before * 2 + head.is_value) * s.block_size + head.slot % s.block_size;
    return pages + tokens_before * s.padded_dim;
}

// Sum over parts of `LANES` lanes, the same bits in every lane of a part.
template <u32 LANES> DEVICE float part_sum(float value) {
#pragma unroll
    for (u32 apart = LANES / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

DEVICE float norm_scale(const Shape& s, float squares) { return rsqrtf(squares / s.dim + s.eps); }

// `x` times `scale`, rounded, times `weight`, rounded.
DEVICE float normalised(float x, float scale, float weight) {
    return to_float(to_bf16(to_float(to_bf16(x * scale)) * weight));
}

DEVICE void turn(float& a, float& b, float cos, float sin) {
    float before = a;
    a = before * cos - b * sin;
    b = b * cos + before * sin;
}

// ---- Eight columns a lane ----

struct Eight {
    float4 low, high;
};

// Columns of a lane's two vectors: apart in a half-split head where they turn, otherwise neighbours.
struct Columns {
    u32 low, high;
    bool apart, turn;
};

DEVICE Columns columns_of_lane(const Shape& s, u32 lane, bool turns) {
    bool turn = turns && lane * 4 < s.half;
    bool apart = turn && !s.interleaved;
    return {apart ? lane * 4 : lane * 8, apart ? s.half + lane * 4 : lane * 8 + 4, apart, turn};
}

DEVICE Eight load_eight(const float* head, Columns at) {
    return {as_floats(load_16(head + at.low)), as_floats(load_16(head + at.high))};
}

DEVICE float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

DEVICE float squares_of(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }

DEVICE float4 normalised(float4 x, float scale, float4 weight) {
    return make_float4(normalised(x.x, scale, weight.x), normalised(x.y, scale, weight.y),
                       normalised(x.z, scale, weight.z), normalised(x.w, scale, weight.w));
}

DEVICE void turn(Eight& x, Columns at, float4 cos, float4 sin) {
    if (at.apart) {
        turn(x.low.x, x.high.x, cos.x, sin.x);
        turn(x.low.y, x.high.y, cos.y, sin.y);
        turn(x.low.z, x.high.z, cos.z, sin.z);
        turn(x.low.w, x.high.w, cos.w, sin.w);
    } else {
        turn(x.low.x, x.low.y, cos.x, sin.x);
        turn(x.low.z, x.low.w, cos.y, sin.y);
        turn(x.high.x, x.high.y, cos.z, sin.z);
        turn(x.high.z, x.high.w, cos.w, sin.w);
    }
}

DEVICE void store_eight(bf16* out, Columns at, const Eight& x) {
    uint2 low = make_uint2(pack_bf16(x.low.x, x.low.y), pack_bf16(x.low.z, x.low.w));
    uint2 high = make_uint2(pack_bf16(x.high.x, x.high.y), pack_bf16(x.high.z, x.high.w));
    if (at.apart) {
        store_8(out + at.low, low);
        store_8(out + at.high, high);
    } else {
        store_16(out + at.low, make_uint4(low.x, low.y, high.x, high.y));
    }
}

// All that a lane reads, under way at once. Zeros where it reads nothing.
struct Reads {
    Eight x, bias, weight;
    float4 cos, sin;
};

DEVICE Reads read_all(const Head& head, Columns at, u32 lane, bool has_columns) {
    float4 zeros = make_float4(0, 0, 0, 0);
    Reads r = {{zeros, zeros}, {zeros, zeros}, {zeros, zeros}, zeros, zeros};
    if (!has_columns) return r;
    r.x = load_eight(head.x, at);
    if (head.bias) r.bias = load_eight(head.bias, at);
    if (head.turns() && head.norm) r.weight = load_eight(head.norm, at);
    if (!at.turn) return r;
    r.cos = as_floats(load_16(head.cos + lane * 4));
    r.sin = as_floats(load_16(head.sin + lane * 4));
    return r;
}

// Head widths and rotated widths that are multiples of eight, at most `8 * LANES`.
template <u32 LANES> DEVICE void eight_columns_a_lane(const Inputs& in, const Shape& s, bf16* queries, bf16* pages) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % LANES;
    Head head = head_of_task(in, s, thread / LANES);
    Columns at = columns_of_lane(s, lane, head.turns());
    Reads r = read_all(head, at, lane, lane * 8 < s.dim);
    Eight x = r.x;
    if (head.bias) x = {sum_of(x.low, r.bias.low), sum_of(x.high, r.bias.high)};
    // Lanes of value heads take part in the sum, since they share a warp with others.
    if (in.query_norm) {
        float scale = norm_scale(s, part_sum<LANES>(squares_of(x.low) + squares_of(x.high)));
        if (head.turns()) x = {normalised(x.low, scale, r.weight.low), normalised(x.high, scale, r.weight.high)};
    }
    if (at.turn) turn(x, at, r.cos, r.sin);
    // A lane beyond the head's width holds zeros: they are the padding.
    bf16* out = place_of(head, s, queries, pages);
    if (out && lane * 8 < s.padded_dim) store_eight(out, at, x);
}

// ---- Any even width up to 256: a warp a head, the pairs `lane + 32 j` a lane ----

constexpr u32 PAIRS = 4;

struct Pair {
    u32 a, b;
};

DEVICE Pair pair_at(const Shape& s, u32 pair, bool turns) {
    bool apart = turns && !s.interleaved && pair < s.half;
    return apart ? Pair{pair, s.half + pair} : Pair{2 * pair, 2 * pair + 1};
}

DEVICE void any_columns(const Inputs& in, const Shape& s, bf16* queries, bf16* pages) {
    u32 lane = lane_index();
    Head head = head_of_task(in, s, (blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    float a[PAIRS], b[PAIRS], squares = 0;
#pragma unroll
    for (u32 j = 0; j < PAIRS; j++) {
        u32 pair = lane + j * WARP;
        Pair at = pair_at(s, pair, head.turns());
        a[j] = b[j] = 0;
        if (pair >= s.dim / 2) continue;
        a[j] = head.x[at.a] + (head.bias ? head.bias[at.a] : 0);
        b[j] = head.x[at.b] + (head.bias ? head.bias[at.b] : 0);
        squares += a[j] * a[j] + b[j] * b[j];
    }
    float scale = in.query_norm ? norm_scale(s, warp_sum(squares)) : 1;
    bf16* out = place_of(head, s, queries, pages);
    if (!out) return;
#pragma unroll
    for (u32 j = 0; j < PAIRS; j++) {
        u32 pair = lane + j * WARP;
        Pair at = pair_at(s, pair, head.turns());
        if (pair >= s.padded_dim / 2) continue;
        if (pair < s.dim / 2 && head.turns() && in.query_norm) {
            a[j] = normalised(a[j], scale, head.norm[at.a]);
            b[j] = normalised(b[j], scale, head.norm[at.b]);
        }
        if (head.turns() && pair < s.half) turn(a[j], b[j], head.cos[pair], head.sin[pair]);
        out[at.a] = to_bf16(a[j]);
        out[at.b] = to_bf16(b[j]);
    }
}

#define PARAMETERS                                                                                                     \
    (const float* __restrict__ x, const float* __restrict__ bias, const float* __restrict__ query_norm,                \
     const float* __restrict__ key_norm, const float* __restrict__ cos, const float* __restrict__ sin,                 \
     const u32* __restrict__ slots, bf16* __restrict__ queries, bf16* __restrict__ pages, Shape shape)
#define ARGUMENTS Inputs{x, bias, query_norm, key_norm, cos, sin, slots}, shape, queries, pages

KERNEL(qkv_8, 128, 8, PARAMETERS) { eight_columns_a_lane<8>(ARGUMENTS); }
KERNEL(qkv_16, 128, 8, PARAMETERS) { eight_columns_a_lane<16>(ARGUMENTS); }
KERNEL(qkv_32, 128, 8, PARAMETERS) { eight_columns_a_lane<32>(ARGUMENTS); }
KERNEL(qkv_any, 128, 8, PARAMETERS) { any_columns(ARGUMENTS); }
