// What the sampler's kernels share: a request's numbers, the order of tokens, weights, draws, and walks over a row.
//
// Everything that decides about a token is an integer or one f32 or f64 operation after another, each rounded to
// nearest and never fused, as the CPU's sampler does them. Sums are integers, so their order does not matter: any cut
// of a row into blocks, and of the vocabulary into ranks, gives the same token.
#pragma once

// How one row is sampled; packed by `rows.rs`.
struct alignas(16) Row {
    u64 key;      // Of the draw: seed and position, mixed.
    double share; // 1 - top_p.
    float inverse; // 1 / temperature.
    float log_min_p;
    u32 top_k; // 0: all.
    u32 flags;
    float repetition, frequency, presence;
    u32 first_entry, end_entry; // Of its changes.
    u32 unused[3];
};

constexpr u32 GREEDY = 1, MIN_P = 2, TOP_P = 4;

// One change of one token's logit. A row's are ordered by token, those of one token as they are to be applied.
struct alignas(16) Entry {
    u32 token, kind, amount, unused;
};

constexpr u32 MASKED = 0, BIASED = 1, SEEN = 2;

constexpr u32 NO_TOKEN = 0xffffffffu;

// The best noisy logit of a part of a row.
struct alignas(16) Draw {
    double value;
    u32 token, unused;
};

// ---- The order of tokens ----

// Floats as integers in the same order; both zeros are one.
DEVICE u32 image_of(float value) {
    u32 bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of_image(u32 image) {
    return __uint_as_float(image & 0x80000000u ? image & 0x7fffffffu : ~image);
}

// A token's place: the greater, the likelier; among equals the lower id is greater.
DEVICE u64 place_of(float value, u32 token) { return (u64)image_of(value) << 32 | (u32)~token; }
DEVICE float value_at(u64 place) { return value_of_image((u32)(place >> 32)); }
DEVICE u32 token_at(u64 place) { return ~(u32)place; }

// Below every place whose logit is more than minus infinity.
constexpr u64 FIRST_PLACE = (u64)0x00800000u << 32;

DEVICE float number(float value) { return value == value ? value : minus_infinity(); }

// The logit by which tokens are compared: NaN counts as minus infinity.
DEVICE float scaled(float logit, const Row& row) {
    return number(row.flags & GREEDY ? logit : __fmul_rn(logit, row.inverse));
}

// The least place that -inf and min-p leave.
DEVICE u64 floor_of(const Row& row, float largest) {
    if (!(row.flags & MIN_P)) return FIRST_PLACE;
    float least = fminf(__fadd_rn(largest, row.log_min_p), largest);
    return max((u64)image_of(least) << 32, FIRST_PLACE);
}

DEVICE bool is_filtered(const Row& row) { return row.top_k != 0 || row.flags & TOP_P; }

// ---- Weights ----

constexpr float WEIGHT_UNIT = 1099511627776.0f; // 2^40: the weight of the likeliest token.
constexpr float DISTANCE_MAX = 28.0f;           // e^-28 is less than one part of it.

// e^-distance for 0 <= distance < 87, within 2^-22 of itself at 0 and 2^-19 at 28.
DEVICE float exp_of_minus(float distance) {
    constexpr float ROUNDER = 12582912.0f; // 1.5 * 2^23: no place for a fraction beside it.
    float x = __fmul_rn(distance, -1.44269504f);
    float whole = __fadd_rn(__fadd_rn(x, ROUNDER), -ROUNDER);
    float fraction = __fadd_rn(x, -whole);
    float sum = 1.5252734e-5f;
    sum = __fadd_rn(__fmul_rn(sum, fraction), 1.540353e-4f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 1.3333558e-3f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 9.618129e-3f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 5.550411e-2f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 2.402265e-1f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 6.931472e-1f);
    sum = __fadd_rn(__fmul_rn(sum, fraction), 1.0f);
    return __fmul_rn(sum, __uint_as_float((u32)(127 + (i32)whole) << 23));
}

// How far below the largest. Infinities among themselves are not apart.
DEVICE float distance_of(float value, float largest) { return value == largest ? 0.0f : __fsub_rn(largest, value); }

DEVICE u64 weight_at(float distance) {
    return distance < DISTANCE_MAX ? __float2ull_rz(__fmul_rn(exp_of_minus(distance), WEIGHT_UNIT)) : 0;
}

DEVICE u64 weight_of(u64 place, float largest) { return weight_at(distance_of(value_at(place), largest)); }

// ---- Draws ----

DEVICE u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// 52 random bits of one token.
DEVICE u64 random_bits(u64 key, u32 token) { return mix(key + token * 0xd1342543de82ef95ull) >> 12; }

// ln x for positive normal x, within 4 ulp: x = m 2^e with m around 1, and ln m = 2 artanh((m - 1) / (m + 1)) by its
// series, whose first dropped term is below 2^-60.
DEVICE double natural_log(double x) {
    constexpr u64 SQRT_HALF = 0x3fe6a09e667f3bcdull;
    u64 bits = (u64)__double_as_longlong(x);
    i64 exponent = (i64)(bits - SQRT_HALF) >> 52;
    double m = __longlong_as_double((i64)(bits - ((u64)exponent << 52)));
    double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
    double z = __dmul_rn(s, s);
    double sum = 1.0 / 21.0;
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 19.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 17.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 15.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 13.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 11.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 9.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 7.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 5.0);
    sum = __dadd_rn(__dmul_rn(sum, z), 1.0 / 3.0);
    double twice = __dadd_rn(s, s);
    double of_m = __dadd_rn(twice, __dmul_rn(__dmul_rn(twice, z), sum));
    return __dadd_rn(__dmul_rn((double)(i32)exponent, 0.6931471805599453), of_m);
}

// The logit with its Gumbel noise, -ln(-ln u), u = (bits + 1/2) / 2^52.
DEVICE double noisy(float value, u64 bits) {
    double u = __dmul_rn(__dadd_rn((double)(i64)bits, 0.5), 2.220446049250313e-16);
    return __dadd_rn((double)value, -natural_log(-natural_log(u)));
}

// Whether a token surely stays below a noisy logit of at least `best`, without f64. It wins only if -ln u <= e^-gap;
// -ln u >= 1 - u, which is at least 2^-53 = e^-36.7 and at least `rest`. The factor covers the roundings (below 2^-14).
DEVICE bool is_out_of_reach(float gap) { return gap > 37.0f; }

DEVICE bool surely_loses(float gap, u64 bits) {
    float rest = __fmul_rn((float)(u32)(((1ull << 52) - 1 - bits) >> 20), 2.3283064e-10f);
    return gap > 0.0f && rest > 1.001f * exp2_approx(-1.44269504f * gap);
}

DEVICE bool beats(double value, u32 token, double other, u32 other_token) {
    return value > other || (value == other && token < other_token);
}

// The best draw so far of one thread.
struct Leader {
    double value;
    u32 token;
    float reach; // Not above `value`.

    DEVICE void set(double to, u32 by) { value = to, token = by, reach = __double2float_rd(to); }

    // Whether a token may beat it: false for nearly all, and cheap.
    DEVICE bool may_lose_to(u64 key, float logit, u32 other) const {
        float gap = __fsub_rd(reach, logit);
        return !is_out_of_reach(gap) && !surely_loses(gap, random_bits(key, other));
    }

    DEVICE void challenge(u64 key, float logit, u32 by) {
        double with_noise = noisy(logit, random_bits(key, by));
        if (beats(with_noise, by, value, token)) set(with_noise, by);
    }
};

// The leader of a block, in thread 0. `scratch`: room for 32 draws.
DEVICE Draw block_leader(double value, u32 token, Draw* scratch) {
    for (u32 apart = 16; apart > 0; apart /= 2) {
        double other = __shfl_xor_sync(ALL_LANES, value, apart);
        u32 other_token = __shfl_xor_sync(ALL_LANES, token, apart);
        if (beats(other, other_token, value, token)) value = other, token = other_token;
    }
    if (lane_index() == 0) scratch[warp_index()] = Draw{value, token, 0};
    __syncthreads();
    Draw best = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / WARP; warp++) {
        Draw other = scratch[warp];
        if (beats(other.value, other.token, best.value, best.token)) best = other;
    }
    return best;
}

// ---- Rows and blocks ----

// A slice of one row of logits: tokens `first .. first + width`. Its walks over `begin .. end` (multiples of four, or
// the end) are the block's threads' together.
struct Logits {
    const float* values;
    u32 width, first;

    // Calls `use(logit, token)` for all.
    template <class Use> DEVICE void each(u32 begin, u32 end, Use use) const {
        if (width % 4 != 0) {
            for (u32 at = begin + threadIdx.x; at < end; at += blockDim.x) use(values[at], first + at);
            return;
        }
        walk(begin, end, [&](uint4 four, u32 at, u32) {
            use(__uint_as_float(four.x), first + at);
            use(__uint_as_float(four.y), first + at + 1);
            use(__uint_as_float(four.z), first + at + 2);
            use(__uint_as_float(four.w), first + at + 3);
        }, [](u32) {});
    }

    // Calls `use(logit, token)` for those that are wanted, which are few: its code is there once, and they are read
    // again.
    template <class Wanted, class Use> DEVICE void each_where(u32 begin, u32 end, Wanted wanted, Use use) const {
        if (width % 4 != 0) {
            for (u32 at = begin + threadIdx.x; at < end; at += blockDim.x)
                if (wanted(values[at], first + at)) use(values[at], first + at);
            return;
        }
        u32 found = 0; // A bit for each of the loop's floats.
        walk(begin, end, [&](uint4 four, u32 at, u32 bit) {
            found |= (u32)wanted(__uint_as_float(four.x), first + at) << bit;
            found |= (u32)wanted(__uint_as_float(four.y), first + at + 1) << (bit + 1);
            found |= (u32)wanted(__uint_as_float(four.z), first + at + 2) << (bit + 2);
            found |= (u32)wanted(__uint_as_float(four.w), first + at + 3) << (bit + 3);
        }, [&](u32 from) {
            for (; found != 0; found &= found - 1) {
                u32 bit = (u32)__ffs((i32)found) - 1, at = from + bit / 4 * blockDim.x * 4 + bit % 4;
                use(values[at], first + at);
            }
        });
    }

  private:
    // Calls `use(four floats, their index, their first bit)`, four times, of loads that are under way together, then
    // `after(index of the first)`.
    template <class Use, class After> DEVICE void walk(u32 begin, u32 end, Use use, After after) const {
        constexpr u32 AT_ONCE = 4;
        u32 apart = blockDim.x * 4;
        for (u32 at = begin + threadIdx.x * 4; at < end; at += apart * AT_ONCE) {
            uint4 four[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                if (at + i * apart < end) four[i] = load_16(values + at + i * apart);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                if (at + i * apart < end) use(four[i], at + i * apart, 4 * i);
            after(at);
        }
    }
};

DEVICE u64 warp_largest(u64 value) {
    for (u32 apart = 16; apart > 0; apart /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, apart));
    return value;
}

DEVICE u64 block_largest(u64 value, u64* scratch) {
    value = warp_largest(value);
    if (lane_index() == 0) scratch[warp_index()] = value;
    __syncthreads();
    return warp_largest(lane_index() < blockDim.x / WARP ? scratch[lane_index()] : 0);
}

DEVICE u64 block_total(u64 value, u64* scratch) {
    for (u32 apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    if (lane_index() == 0) scratch[warp_index()] = value;
    __syncthreads();
    value = lane_index() < blockDim.x / WARP ? scratch[lane_index()] : 0;
    for (u32 apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

// The best place of a row over all ranks' slices. `standings`: [ranks][rows].
DEVICE u64 best_of_ranks(const u64* standings, u32 ranks, u32 rows, u32 row) {
    u64 best = 0;
    for (u32 rank = 0; rank < ranks; rank++) best = max(best, standings[(u64)rank * rows + row]);
    return best;
}

// The first of `entries[begin .. end]` whose token is `token` or more.
DEVICE u32 entries_before(const Entry* entries, u32 begin, u32 end, u64 token) {
    while (begin < end) {
        u32 middle = begin + (end - begin) / 2;
        if (entries[middle].token < token) begin = middle + 1;
        else end = middle;
    }
    return begin;
}
