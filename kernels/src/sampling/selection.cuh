// Finding the token at which a row's candidates end, without sorting.
//
// Tokens lie in 2048 bins by their distance below the best one. Of the bin in which the boundary lies, digit after
// digit of the places is counted until few tokens are left; these are compared with each other.
#pragma once

constexpr u32 BINS = 2048;
constexpr float BINS_PER_UNIT = 64.0f;
constexpr u32 DIGITS = 256;
constexpr u32 LISTED_MAX = 1024;

// A place: four digits of a logit, then four of an id.
constexpr i32 LAST_KEY_DIGIT = 32, LAST_ID_DIGIT = 0;

DEVICE u32 bin_of(float distance) {
    return distance < (BINS - 1) / BINS_PER_UNIT ? (u32)__fmul_rn(distance, BINS_PER_UNIT) : BINS - 1;
}

// How many tokens, and their weights.
struct alignas(16) Amount {
    u64 count, mass;
};

// The last bin is beyond all weights.
static_assert((BINS - 1) / BINS_PER_UNIT > DISTANCE_MAX, "tokens of the last bin weigh nothing");

DEVICE Amount operator+(Amount a, Amount b) { return {a.count + b.count, a.mass + b.mass}; }

template <bool BY_MASS> DEVICE u64 measure(Amount amount) { return BY_MASS ? amount.mass : amount.count; }

// Amounts by bucket in shared memory, the likeliest tokens in bucket 0. 64-bit sums in two 32-bit atomics, which the
// hardware has for shared memory.
struct Histogram {
    u32 *counts, *low, *high;

    DEVICE void clear(u32 buckets) const {
        for (u32 at = threadIdx.x; at < buckets; at += blockDim.x) counts[at] = low[at] = high[at] = 0;
    }

    DEVICE void add(u32 bucket, u64 mass) const {
        atomicAdd(&counts[bucket], 1u);
        if (mass == 0) return;
        u32 part = (u32)mass;
        u32 carry = atomicAdd(&low[bucket], part) + part < part;
        u32 upper = (u32)(mass >> 32) + carry;
        if (upper) atomicAdd(&high[bucket], upper);
    }

    DEVICE Amount of(u32 bucket) const { return {counts[bucket], (u64)high[bucket] << 32 | low[bucket]}; }
};

// Where a walk from the top reached what it looked for.
struct alignas(16) Found {
    Amount above, within;
    u64 place;
    u32 bucket, listed;
};

// A block's shared memory.
struct Bench {
    Histogram bins, digits;
    u64 *places, *weights;
    Amount* warps;
    Found* found;
    u64* scratch;
};

constexpr u32 BENCH_BYTES = 3 * 4 * (BINS + DIGITS) + 16 * LISTED_MAX + 512 + 128 + 256;

DEVICE Bench bench() {
    u32* words = shared_memory<u32>();
    constexpr u32 DIGITS_AT = 3 * BINS, PLACES_AT = 4 * 3 * (BINS + DIGITS), WARPS_AT = PLACES_AT + 16 * LISTED_MAX;
    return {{words, words + BINS, words + 2 * BINS},
            {words + DIGITS_AT, words + DIGITS_AT + DIGITS, words + DIGITS_AT + 2 * DIGITS},
            shared_memory<u64>(PLACES_AT),
            shared_memory<u64>(PLACES_AT + 8 * LISTED_MAX),
            shared_memory<Amount>(WARPS_AT),
            shared_memory<Found>(WARPS_AT + 512),
            shared_memory<u64>(WARPS_AT + 512 + 128)};
}

DEVICE Amount warp_prefix(Amount own) {
    for (u32 apart = 1; apart < WARP; apart *= 2) {
        u64 count = __shfl_up_sync(ALL_LANES, own.count, apart), mass = __shfl_up_sync(ALL_LANES, own.mass, apart);
        if (lane_index() >= apart) own = own + Amount{count, mass};
    }
    return own;
}

// What lies before each thread's `own` in thread order, and `total`, all of it.
DEVICE Amount block_before(Amount own, Amount* warps, Amount& total) {
    Amount up_to = warp_prefix(own);
    __syncthreads();
    if (lane_index() == WARP - 1) warps[warp_index()] = up_to;
    __syncthreads();
    Amount before = {up_to.count - own.count, up_to.mass - own.mass}, sum = {0, 0};
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) {
        if (warp == warp_index()) before = before + sum;
        sum = sum + warps[warp];
    }
    total = sum;
    return before;
}

DEVICE Amount total_of(const Histogram& histogram, u32 buckets, const Bench& at) {
    Amount own = {0, 0}, total;
    for (u32 bucket = threadIdx.x; bucket < buckets; bucket += blockDim.x) own = own + histogram.of(bucket);
    block_before(own, at.warps, total);
    return total;
}

// The bucket with which the amounts reach `needed`, which is at least 1 and at most all of them.
template <bool BY_MASS> DEVICE Found find_bucket(const Histogram& histogram, u32 buckets, u64 needed, const Bench& at) {
    u32 each = divide_up(buckets, blockDim.x), begin = min(threadIdx.x * each, buckets);
    u32 end = min(begin + each, buckets);
    Amount own = {0, 0}, total;
    for (u32 bucket = begin; bucket < end; bucket++) own = own + histogram.of(bucket);
    Amount above = block_before(own, at.warps, total);
    if (measure<BY_MASS>(above) < needed && needed <= measure<BY_MASS>(above + own)) {
        for (u32 bucket = begin; bucket < end; bucket++) {
            Amount within = histogram.of(bucket);
            if (needed <= measure<BY_MASS>(above + within)) {
                *at.found = Found{above, within, 0, bucket, 0};
                break;
            }
            above = above + within;
        }
    }
    __syncthreads();
    return *at.found;
}

// Tokens of one bin whose places begin with certain digits.
struct Members {
    float largest;
    u32 bin;
    u64 mask, digits;

    DEVICE bool holds(u64 place) const {
        return (place & mask) == digits && bin_of(distance_of(value_at(place), largest)) == bin;
    }
};

// Collects the members, at most LISTED_MAX, and returns how many.
template <class Source> DEVICE u32 list(const Source& source, const Members& members, const Bench& at) {
    __syncthreads();
    if (threadIdx.x == 0) at.found->listed = 0;
    __syncthreads();
    source.each_where([&](u64 place) { return members.holds(place); }, [&](u64 place) {
        u32 to = atomicAdd(&at.found->listed, 1u);
        if (to >= LISTED_MAX) return; // Never, unless the bins were not zero before the launch.
        at.places[to] = place;
        at.weights[to] = weight_of(place, members.largest);
    });
    __syncthreads();
    return min(at.found->listed, LISTED_MAX);
}

// The listed token with which the amounts reach `needed`.
template <bool BY_MASS> DEVICE u64 find_listed(u32 listed, u64 needed, const Bench& at) {
    for (u32 mine = threadIdx.x; mine < listed; mine += blockDim.x) {
        u64 place = at.places[mine], above = 0;
        for (u32 other = 0; other < listed; other++)
            if (at.places[other] > place) above += BY_MASS ? at.weights[other] : 1;
        if (above < needed && needed <= above + (BY_MASS ? at.weights[mine] : 1)) at.found->place = place;
    }
    __syncthreads();
    return at.found->place;
}

struct Boundary {
    u64 place;
    u64 mass; // Of all tokens down to the boundary's logit; by count and key digits alone.
};

// The token with which the likeliest of the source reach `needed` (tokens, or weight), 1 <= needed <= all of it.
// `last_digit` = LAST_KEY_DIGIT where equal logits need not be told apart: then the place may be one that no token has,
// but has the boundary's logit.
template <bool BY_MASS, class Source>
DEVICE Boundary find_boundary(const Source& source, float largest, u64 needed, i32 last_digit, const Bench& at) {
    Found found = find_bucket<BY_MASS>(at.bins, BINS, needed, at);
    needed -= measure<BY_MASS>(found.above);
    u64 mass_above = found.above.mass;
    Members members = {largest, found.bucket, 0, 0};
    for (i32 digit = 56; found.within.count > LISTED_MAX && digit >= last_digit; digit -= 8) {
        __syncthreads();
        at.digits.clear(DIGITS);
        __syncthreads();
        source.each_where([&](u64 place) { return members.holds(place); }, [&](u64 place) {
            at.digits.add(DIGITS - 1 - (u32)(place >> digit) % DIGITS, weight_of(place, largest));
        });
        __syncthreads();
        found = find_bucket<BY_MASS>(at.digits, DIGITS, needed, at);
        needed -= measure<BY_MASS>(found.above);
        mass_above += found.above.mass;
        members.mask |= (u64)(DIGITS - 1) << digit;
        members.digits |= (u64)(DIGITS - 1 - found.bucket) << digit;
    }
    if (found.within.count > LISTED_MAX) return {members.digits, mass_above + found.within.mass};
    u32 listed = list(source, members, at);
    u64 place = find_listed<BY_MASS>(listed, needed, at);
    u64 mass = 0;
    for (u32 mine = threadIdx.x; mine < listed; mine += blockDim.x)
        if (at.places[mine] >> 32 >= place >> 32) mass += at.weights[mine];
    return {place, mass_above + block_total(mass, at.scratch)};
}

// What top-p leaves of `mass`: the least likely go while they sum to at most `share`; the best one stays.
DEVICE u64 mass_to_keep(u64 mass, double share) {
    u64 budget = min(__double2ull_rz(__dmul_rn(share, __ull2double_rn(mass))), mass);
    return max(mass - budget, (u64)1);
}

// The least place that top-k and top-p leave, and whether `known`, what the source really holds, suffices to tell.
// `total` is what there is.
template <class Source>
DEVICE u64 threshold_of(const Source& source, const Row& row, float largest, Amount total, Amount known,
                        const Bench& at, bool& complete) {
    u64 threshold = floor_of(row, largest), mass = total.mass;
    complete = true;
    if (row.top_k != 0 && row.top_k < total.count) {
        complete = row.top_k <= known.count;
        if (!complete) return threshold;
        Boundary boundary = find_boundary<false>(source, largest, row.top_k, LAST_KEY_DIGIT, at);
        threshold = boundary.place >> 32 << 32;
        mass = boundary.mass;
    }
    if (row.flags & TOP_P) {
        u64 needed = mass_to_keep(mass, row.share);
        complete = needed <= known.mass;
        if (!complete) return threshold;
        threshold = find_boundary<true>(source, largest, needed, LAST_ID_DIGIT, at).place;
    }
    return threshold;
}
