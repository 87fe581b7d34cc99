// What decode and prefill share: everything from queries in global memory to a row's sums.
//
// A tile of rows is 16 or more pairs (token, query head), the query heads of one KV head side by side, so that a group
// reads its keys and values once. Keys come in tiles aligned to absolute positions. Both kernels run this text, and a
// row's numbers pass through the same operations in both, whatever rows and keys surround it:
//  * a score is summed over the head's dimensions in steps of 16, ascending;
//  * per tile of keys the row's maximum grows, older sums are multiplied by 2^(before - now), the weights
//    2^(score - maximum) are rounded to BF16, and their products with the values are added in steps of 16 keys; the sum
//    of weights is one more column of that product, whose values are ones;
//  * a tile of which a row sees nothing multiplies its sums by one and adds zero;
//  * sums of chunks of keys are joined left to right by `join`, here or in `attention_merge`, and the sink comes last.
// Every multiplication or addition whose result could be fused or not is spelled as `__fmul_rn` and its relatives, so
// that the compiler has no choice to make differently in two kernels.
//
// What a row does not see reaches nothing: scores are replaced by minus infinity, values outside all rows' sight are
// replaced by zeros on their way into shared memory, and those that only some rows see by `set_unbounded_apart`.
#pragma once
#include "prelude.cuh"

// One call, alike for all its kernels. Offsets are in elements.
struct Call {
    const bf16* queries;  // [rows][query heads][padded_dim]
    const bf16* pages;    // one layer: [page][KV head][keys, values][block_size][padded_dim]
    const u32* spans;     // per sequence: first row, rows, keys that the last row sees, start of its block table
    const u32* tables;    // block tables
    const u32* groups;    // query heads groups[h] .. groups[h + 1] read KV head h
    const u32* work;      // decode: first partial of each sequence; prefill: (sequence, tile of rows) per block
    const float* sinks;   // one per query head, or null
    float* partials;      // decode: [partial][query head][padded_dim], then [partial][query head][maximum, weights]
    bf16* out;            // [rows][out_stride]
    u64 page_elements;
    u64 partial_elements; // of all partials' values: where their maxima begin
    float scale;          // of scores, times log2 e; positive
    u32 query_heads;
    u32 head_dim;
    u32 padded_dim;
    u32 block_size;
    u32 out_stride;
    u32 window;           // keys that a row sees at most
    u32 chunk;            // keys whose sums stand alone; a multiple of 64
    u32 row_tiles;        // decode: tiles of rows that the largest group takes
    u32 unused;
};

// Where queries lie while tiles of keys pass.
enum class Queries { InRegisters, InSharedMemory };

// How a block is laid out. `GROUPS` tiles of 16 rows, `SHARE` warps on each: they share the keys of a tile while they
// compute scores, and the head's dimensions while they add values.
template <u32 DIM_, u32 GROUPS_, u32 SHARE_, u32 STAGES_, Queries QUERIES = Queries::InRegisters> struct Layout {
    static constexpr u32 DIM = DIM_, GROUPS = GROUPS_, SHARE = SHARE_, STAGES = STAGES_;
    static constexpr bool KEEP_QUERIES = QUERIES == Queries::InRegisters;
    // One number for both kernels, since it shows in the bits.
    static constexpr u32 KEYS = DIM <= 128 ? 64 : 32;
    static constexpr u32 WARPS = GROUPS * SHARE, THREADS = WARPS * WARP, ROWS = GROUPS * 16;
    // Keys and dimensions of a warp, in tiles of eight.
    static constexpr u32 WARP_KEYS = KEYS / SHARE, KEY_TILES = WARP_KEYS / 8;
    static constexpr u32 WARP_DIMS = DIM / SHARE, DIM_TILES = WARP_DIMS / 8;
    // Elements from row to row in shared memory: eight more, so that eight rows lie in different banks.
    static constexpr u32 STRIDE = DIM + 8, WEIGHT_STRIDE = KEYS + 8;
    static constexpr u32 TILE = KEYS * STRIDE;
    // Rows of a tile of keys that one warp copies: never across 16 keys, hence from one page.
    static constexpr u32 COPY_ROWS = KEYS / WARPS;
    // Shared memory in bytes: queries; weights and maxima, in the place of queries that went to registers; stages of
    // keys and values.
    static constexpr u32 QUERY_BYTES = ROWS * STRIDE * 2;
    static constexpr u32 WEIGHTS_AT = KEEP_QUERIES ? 0 : QUERY_BYTES;
    static constexpr u32 MAXIMA_AT = WEIGHTS_AT + ROWS * WEIGHT_STRIDE * 2;
    static constexpr u32 EXCHANGE_END = SHARE > 1 ? MAXIMA_AT + ROWS * SHARE * 4 : 0;
    static constexpr u32 STAGES_AT = QUERY_BYTES > EXCHANGE_END ? QUERY_BYTES : EXCHANGE_END;

    static_assert(DIM % 32 == 0 && WARP_KEYS % 8 == 0 && WARP_DIMS % 8 == 0 && 16 % COPY_ROWS == 0);
    static_assert(COPY_ROWS * (DIM / 8) % WARP == 0);

    static DEVICE bf16* weights() { return shared_memory<bf16>(WEIGHTS_AT); }
    static DEVICE bf16* keys(u32 stage) { return shared_memory<bf16>(STAGES_AT) + stage * 2 * TILE; }
    static DEVICE bf16* values(u32 stage) { return keys(stage) + TILE; }
    static DEVICE u32 group() { return warp_index() / SHARE; }
    static DEVICE u32 share() { return warp_index() % SHARE; }
    // The first of a lane's two rows; the other is eight below.
    static DEVICE u32 lane_row() { return group() * 16 + lane_index() / 4; }
};

struct Span {
    u32 row, rows, context, table;
};

DEVICE Span span_at(const Call& call, u32 at) {
    uint4 numbers = load_16(call.spans + (u64)at * 4);
    return {numbers.x, numbers.y, numbers.z, numbers.w};
}

DEVICE u32 first_key_seen(u32 position, u32 window) { return position >= window ? position + 1 - window : 0; }

// A tile's rows: pairs `first` and following of a span's `pairs` (token, query head).
struct RowTile {
    Span span;
    u32 head, group;
    u32 first, pairs;

    DEVICE bool holds(u32 row) const { return first + row < pairs; }
    // Rows beyond the last one compute what nobody reads, at its position.
    DEVICE u32 token(u32 row) const { return min(first + row, pairs - 1) / group; }
    DEVICE u32 position(u32 row) const { return span.context - span.rows + token(row); }
    DEVICE u32 query_head(u32 row) const { return head + min(first + row, pairs - 1) % group; }
};

DEVICE RowTile row_tile(const Call& call, Span span, u32 kv_head, u32 first) {
    u32 head = call.groups[kv_head], group = call.groups[kv_head + 1] - head;
    return {span, head, group, first, span.rows * group};
}

// ---- Copies ----

template <class L> DEVICE void copy_queries(const Call& call, const RowTile& tile) {
    constexpr u32 PARTS = L::DIM / 8;
    for (u32 part = threadIdx.x; part < L::ROWS * PARTS; part += L::THREADS) {
        u32 row = part / PARTS, column = part % PARTS * 8;
        u64 from = (u64)(tile.span.row + tile.token(row)) * call.query_heads + tile.query_head(row);
        copy_async_16(shared_memory<bf16>() + row * L::STRIDE + column, call.queries + from * call.padded_dim + column,
                      tile.holds(row) && column < call.padded_dim);
    }
    copy_commit();
}

// Copies tiles of keys `start .. stop` one after another into the stages, two groups of copies a tile: keys, values.
template <class L> struct Stream {
    const bf16* keys;
    const u32* table;
    u64 page_elements;
    u32 padded_dim, block_size;
    u32 start, stop;
    u32 tile, end, stage;
    // Of the warp's part of the next tile: looked up a tile ahead.
    u32 page;

    DEVICE Stream(const Call& call, const RowTile& rows, u32 kv_head, u32 first, u32 last)
        : keys(call.pages + (u64)kv_head * 2 * call.block_size * call.padded_dim),
          table(call.tables + rows.span.table), page_elements(call.page_elements), padded_dim(call.padded_dim),
          block_size(call.block_size), start(first), stop(last), tile(first / L::KEYS),
          end(divide_up(last, L::KEYS)), stage(0), page(look_up()) {}

    DEVICE u32 warp_key() const { return tile * L::KEYS + warp_index() * L::COPY_ROWS; }

    // Entries of the table that nobody sees may point anywhere.
    DEVICE u32 look_up() const {
        u32 key = warp_key();
        return key < stop && key + L::COPY_ROWS > start ? table[key / block_size] : 0;
    }

    DEVICE void copy_rows(bf16* to, const bf16* from, u32 first_key) const {
        constexpr u32 PARTS = L::DIM / 8;
#pragma unroll
        for (u32 at = 0; at < L::COPY_ROWS * PARTS; at += WARP) {
            u32 part = at + lane_index(), row = part / PARTS, column = part % PARTS * 8, key = first_key + row;
            copy_async_16(to + row * L::STRIDE + column, from + row * padded_dim + column,
                          key >= start && key < stop && column < padded_dim);
        }
    }

    DEVICE void copy_next() {
        if (tile < end) {
            u32 key = warp_key(), to = warp_index() * L::COPY_ROWS * L::STRIDE;
            const bf16* from = keys + page * page_elements + (u64)(key % block_size) * padded_dim;
            copy_rows(L::keys(stage) + to, from, key);
            copy_commit();
            copy_rows(L::values(stage) + to, from + (u64)block_size * padded_dim, key);
            copy_commit();
            tile++;
            stage = stage + 1 == L::STAGES ? 0 : stage + 1;
            page = look_up();
        } else {
            copy_commit();
            copy_commit();
        }
    }
};

// ---- Sums ----

// What a lane holds of its rows, `lane_row` and eight below: the maximum of scaled scores, and in the layout of
// `multiply_16x8x16` the sum of weights (the same in all columns) and of weighted values.
template <class L> struct Sums {
    float maximum[2];
    float weights[4];
    float values[L::DIM_TILES][4];

    DEVICE void clear() {
        maximum[0] = maximum[1] = minus_infinity();
#pragma unroll
        for (u32 at = 0; at < 4; at++) weights[at] = 0.0f;
#pragma unroll
        for (u32 tile = 0; tile < L::DIM_TILES; tile++)
#pragma unroll
            for (u32 at = 0; at < 4; at++) values[tile][at] = 0.0f;
    }
};

// What is subtracted from scores whose maximum this is: not minus infinity from itself.
DEVICE float base_of(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

struct Factors {
    float before, added;
};

// Of sums with maximum `maximum` and of others with maximum `other`, when they are joined; `maximum` becomes theirs.
DEVICE Factors join_maxima(float& maximum, float other) {
    float before = maximum;
    maximum = fmaxf(before, other);
    float base = base_of(maximum);
    return {exp2_approx(__fsub_rn(before, base)), exp2_approx(__fsub_rn(other, base))};
}

DEVICE float join(float before, float added, Factors factors) {
    return __fmaf_rn(added, factors.added, __fmul_rn(before, factors.before));
}

template <class L> DEVICE void join_sums(Sums<L>& total, const Sums<L>& chunk) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        Factors factors = join_maxima(total.maximum[half], chunk.maximum[half]);
#pragma unroll
        for (u32 at = 2 * half; at < 2 * half + 2; at++) {
            total.weights[at] = join(total.weights[at], chunk.weights[at], factors);
#pragma unroll
            for (u32 tile = 0; tile < L::DIM_TILES; tile++)
                total.values[tile][at] = join(total.values[tile][at], chunk.values[tile][at], factors);
        }
    }
}

// The sink of a query head in the units of maxima; minus infinity where there is none.
DEVICE float sink_of(const Call& call, u32 query_head) {
    constexpr float LOG2_E = 1.44269504f;
    return call.sinks ? __fmul_rn(call.sinks[query_head], LOG2_E) : minus_infinity();
}

// What weighted values are multiplied by at the end. Zero over zero where every score is minus infinity: NaN.
DEVICE float output_factor(float maximum, float weights, float sink) {
    Factors factors = join_maxima(maximum, sink);
    return __fdiv_rn(factors.before, __fadd_rn(__fmul_rn(weights, factors.before), factors.added));
}

// A minus zero would tell how many tiles a row went through without seeing a key.
DEVICE float output_of(float value, float factor) { return __fmul_rn(__fadd_rn(value, 0.0f), factor); }

// ---- One tile of keys ----

// 16 dimensions of the warp's queries as the left side of a product.
template <class L> DEVICE void load_query(u32 (&query)[4], u32 step) {
    u32 row = L::group() * 16 + lane_index() % 16, column = lane_index() / 16 * 8;
    load_matrices(query, shared_memory<bf16>() + row * L::STRIDE + step * 16 + column);
}

// The warp's queries in registers, if they stay there.
template <class L> struct QuerySteps {
    u32 kept[L::KEEP_QUERIES ? L::DIM / 16 : 1][4];

    DEVICE void load() {
        if constexpr (L::KEEP_QUERIES) {
#pragma unroll
            for (u32 step = 0; step < L::DIM / 16; step++) load_query<L>(kept[step], step);
        }
    }

    DEVICE void get(u32 (&query)[4], u32 step) const {
        if constexpr (L::KEEP_QUERIES) {
#pragma unroll
            for (u32 at = 0; at < 4; at++) query[at] = kept[step][at];
        } else {
            load_query<L>(query, step);
        }
    }
};

// Scores of the warp's keys, not yet scaled.
template <class L>
DEVICE void score(float (&scores)[L::KEY_TILES][4], const QuerySteps<L>& queries, const bf16* keys) {
    const bf16* row = keys + (L::share() * L::WARP_KEYS + lane_index() % 8) * L::STRIDE + lane_index() / 8 * 8;
#pragma unroll
    for (u32 tile = 0; tile < L::KEY_TILES; tile++)
#pragma unroll
        for (u32 at = 0; at < 4; at++) scores[tile][at] = 0.0f;
    // Rolled where nothing in registers is indexed by it: scheduling many steps at once takes registers of its own.
#pragma unroll(L::KEEP_QUERIES ? L::DIM / 32 : 1)
    for (u32 step = 0; step < L::DIM / 16; step += 2) {
        u32 left[2][4];
        queries.get(left[0], step);
        queries.get(left[1], step + 1);
#pragma unroll
        for (u32 tile = 0; tile < L::KEY_TILES; tile++) {
            u32 both[4];
            load_matrices(both, row + tile * 8 * L::STRIDE + step * 16);
            u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
            multiply_16x8x16(scores[tile], left[0], first);
            multiply_16x8x16(scores[tile], left[1], second);
        }
    }
}

// Keys that a lane's two rows see.
struct Sight {
    u32 from[2], to[2];

    DEVICE bool sees(u32 half, u32 key) const { return key >= from[half] && key < to[half]; }
};

// Found anew for each tile that needs it, since few do: it would take registers from all.
template <class L> DEVICE Sight sight_of(const Call& call, const RowTile& rows) {
    u32 above = rows.position(L::lane_row()), below = rows.position(L::lane_row() + 8);
    return {{first_key_seen(above, call.window), first_key_seen(below, call.window)}, {above + 1, below + 1}};
}

template <class L> DEVICE void hide(float (&scores)[L::KEY_TILES][4], const Sight& sight, u32 first_key) {
#pragma unroll
    for (u32 tile = 0; tile < L::KEY_TILES; tile++)
#pragma unroll
        for (u32 at = 0; at < 4; at++) {
            u32 key = first_key + L::share() * L::WARP_KEYS + tile * 8 + lane_index() % 4 * 2 + at % 2;
            if (!sight.sees(at / 2, key)) scores[tile][at] = minus_infinity();
        }
}

// The largest scores of the lane's rows among all keys of the tile; a maximum passes over NaN. Where warps share a
// tile this is a barrier.
template <class L> DEVICE void largest_of(float (&largest)[2], const float (&scores)[L::KEY_TILES][4]) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        largest[half] = minus_infinity();
#pragma unroll
        for (u32 tile = 0; tile < L::KEY_TILES; tile++)
            largest[half] = fmaxf(largest[half], fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(ALL_LANES, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(ALL_LANES, largest[half], 2));
    }
    if (L::SHARE > 1) {
        float* maxima = shared_memory<float>(L::MAXIMA_AT);
        u32 row = L::lane_row();
        if (lane_index() % 4 == 0) {
            maxima[row * L::SHARE + L::share()] = largest[0];
            maxima[(row + 8) * L::SHARE + L::share()] = largest[1];
        }
        __syncthreads();
#pragma unroll
        for (u32 share = 0; share < L::SHARE; share++) {
            largest[0] = fmaxf(largest[0], maxima[row * L::SHARE + share]);
            largest[1] = fmaxf(largest[1], maxima[(row + 8) * L::SHARE + share]);
        }
    }
}

// Raises the maxima to those of this tile and puts the older sums under them; returns what scores lose.
template <class L> DEVICE void rescale(Sums<L>& sums, float (&bases)[2], const float (&largest)[2], float scale) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float before = sums.maximum[half];
        sums.maximum[half] = fmaxf(before, __fmul_rn(largest[half], scale));
        bases[half] = base_of(sums.maximum[half]);
        float factor = exp2_approx(__fsub_rn(before, bases[half]));
#pragma unroll
        for (u32 at = 2 * half; at < 2 * half + 2; at++) {
            sums.weights[at] = __fmul_rn(sums.weights[at], factor);
#pragma unroll
            for (u32 tile = 0; tile < L::DIM_TILES; tile++)
                sums.values[tile][at] = __fmul_rn(sums.values[tile][at], factor);
        }
    }
}

// The weights of the warp's keys, in pairs: [tile of keys][row].
template <class L>
DEVICE void weigh(u32 (&weights)[L::KEY_TILES][2], const float (&scores)[L::KEY_TILES][4], const float (&bases)[2],
                  float scale) {
#pragma unroll
    for (u32 tile = 0; tile < L::KEY_TILES; tile++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            weights[tile][half] = pack_bf16(exp2_approx(__fmaf_rn(scores[tile][2 * half], scale, -bases[half])),
                                            exp2_approx(__fmaf_rn(scores[tile][2 * half + 1], scale, -bases[half])));
}

// Lays the warp's weights down in shared memory, row by row.
template <class L> DEVICE void store_weights(bf16* to, const u32 (&weights)[L::KEY_TILES][2]) {
    bf16* row = to + L::lane_row() * L::WEIGHT_STRIDE + L::share() * L::WARP_KEYS + lane_index() % 4 * 2;
#pragma unroll
    for (u32 tile = 0; tile < L::KEY_TILES; tile++) {
        store_4(row + tile * 8, weights[tile][0]);
        store_4(row + 8 * L::WEIGHT_STRIDE + tile * 8, weights[tile][1]);
    }
}

// The weights of 16 keys as the left side of a product: from the warp's own registers, or as all warps stored them.
template <class L>
DEVICE void load_weights(u32 (&out)[4], const u32 (&own)[L::KEY_TILES][2], u32 step) {
    if constexpr (L::SHARE == 1) {
        out[0] = own[2 * step][0];
        out[1] = own[2 * step][1];
        out[2] = own[2 * step + 1][0];
        out[3] = own[2 * step + 1][1];
    } else {
        u32 row = L::group() * 16 + lane_index() % 16, column = lane_index() / 16 * 8;
        load_matrices(out, L::weights() + row * L::WEIGHT_STRIDE + step * 16 + column);
    }
}

// Adds the weights, and the warp's dimensions of the weighted values.
template <class L>
DEVICE void add_values(Sums<L>& sums, const u32 (&weights)[L::KEY_TILES][2], const bf16* values) {
    constexpr u32 ONES = 0x3f803f80u;
    const u32 ones[2] = {ONES, ONES};
    const bf16* column = values + lane_index() * L::STRIDE + L::share() * L::WARP_DIMS;
#pragma unroll
    for (u32 step = 0; step < L::KEYS / 16; step += 2) {
        u32 left[2][4];
        load_weights<L>(left[0], weights, step);
        load_weights<L>(left[1], weights, step + 1);
        multiply_16x8x16(sums.weights, left[0], ones);
        multiply_16x8x16(sums.weights, left[1], ones);
#pragma unroll
        for (u32 tile = 0; tile < L::DIM_TILES; tile++) {
            u32 both[4];
            load_matrices_transposed(both, column + step * 16 * L::STRIDE + tile * 8);
            u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
            multiply_16x8x16(sums.values[tile], left[0], first);
            multiply_16x8x16(sums.values[tile], left[1], second);
        }
    }
}

// ---- Infinite values that only some rows see ----

DEVICE bool unbounded(float value) { return (__float_as_uint(value) & 0x7f800000u) == 0x7f800000u; }
DEVICE bool any_unbounded(u32 pair) { return unbounded(low_half(pair)) || unbounded(high_half(pair)); }
DEVICE u32 bounded_or_zero(u32 pair) {
    return (unbounded(low_half(pair)) ? 0 : pair & 0xffffu) | (unbounded(high_half(pair)) ? 0 : pair & 0xffff0000u);
}

// Whether the thread's part of a tile of values holds infinities or NaN, which become zeros if `clear`.
template <class L> DEVICE bool find_unbounded(bf16* values, bool clear) {
    constexpr u32 PARTS = L::DIM / 8;
    bool found = false;
#pragma unroll 1
    for (u32 part = threadIdx.x; part < L::KEYS * PARTS; part += L::THREADS) {
        bf16* place = values + part / PARTS * L::STRIDE + part % PARTS * 8;
        uint4 eight = load_16(place);
        if (any_unbounded(eight.x) || any_unbounded(eight.y) || any_unbounded(eight.z) || any_unbounded(eight.w)) {
            found = true;
            if (clear)
                store_16(place, make_uint4(bounded_or_zero(eight.x), bounded_or_zero(eight.y), bounded_or_zero(eight.z),
                                           bounded_or_zero(eight.w)));
        }
    }
    return found;
}

// Adds what infinite and NaN values are to the rows that see them. They spoil a sum alike, whatever the order.
template <class L>
DEVICE void add_unbounded(Sums<L>& sums, const Sight& sight, u32 first_key, const bf16* weights, const bf16* values) {
    const bf16* row = weights + L::lane_row() * L::WEIGHT_STRIDE;
    const bf16* column = values + L::share() * L::WARP_DIMS + lane_index() % 4 * 2;
#pragma unroll 1
    for (u32 key = 0; key < L::KEYS; key++) {
        float weight[2] = {to_float(row[key]), to_float(row[8 * L::WEIGHT_STRIDE + key])};
#pragma unroll
        for (u32 tile = 0; tile < L::DIM_TILES; tile++) {
            u32 pair = load_4(column + key * L::STRIDE + tile * 8);
            float value[2] = {low_half(pair), high_half(pair)};
#pragma unroll
            for (u32 at = 0; at < 4; at++)
                if (unbounded(value[at % 2]) && sight.sees(at / 2, first_key + key))
                    sums.values[tile][at] = __fmaf_rn(weight[at / 2], value[at % 2], sums.values[tile][at]);
        }
    }
}

// An infinity times the weight zero of a row that does not see it would be NaN. So infinities and NaN, if there are
// any, are added to the rows that see them, and zeros take their place before the product. `scratch` is the tile's
// keys, which are done with.
template <class L>
DEVICE void set_unbounded_apart(Sums<L>& sums, const Sight& sight, u32 first_key, const u32 (&weights)[L::KEY_TILES][2],
                                bf16* scratch, bf16* values) {
    if (!__syncthreads_or(find_unbounded<L>(values, false))) return;
    const bf16* stored = L::weights();
    if (L::SHARE == 1) {
        store_weights<L>(scratch, weights);
        __syncwarp();
        stored = scratch;
    }
    add_unbounded<L>(sums, sight, first_key, stored, values);
    __syncthreads();
    find_unbounded<L>(values, true);
    __syncthreads();
}

// ---- All tiles ----

// Sums over keys `start .. stop` for the rows of a tile, in `total`. `CHUNKED`: chunk by chunk, joined left to right.
template <class L, bool CHUNKED>
DEVICE void attend(const Call& call, const RowTile& rows, u32 kv_head, u32 start, u32 stop, Sums<L>& total) {
    Stream<L> stream(call, rows, kv_head, start, stop);
    copy_queries<L>(call, rows);
#pragma unroll
    for (u32 stage = 0; stage + 1 < L::STAGES; stage++) stream.copy_next();

    // Keys that all rows see.
    u32 first_position = rows.position(0), last_position = rows.position(L::ROWS - 1);
    u32 seen_from = first_key_seen(last_position, call.window), seen_to = first_position + 1;

    QuerySteps<L> queries;
    copy_wait<2 * (L::STAGES - 1)>();
    __syncthreads();
    queries.load();

    Sums<L> sums;
    sums.clear();
    total.clear();
    u32 chunk_end = CHUNKED ? (start / call.chunk + 1) * call.chunk : 0;
    u32 stage = 0;
    for (u32 key = start / L::KEYS * L::KEYS; key < stop; key += L::KEYS) {
        if (CHUNKED && key == chunk_end) {
            join_sums(total, sums);
            sums.clear();
            chunk_end += call.chunk;
        }
        // The keys are there, or, where one barrier shall do, the values too; and all are done with the last tile.
        copy_wait<L::SHARE == 1 ? 2 * (L::STAGES - 2) : 2 * (L::STAGES - 1) - 1>();
        __syncthreads();
        stream.copy_next();

        bool some_unseen = key < seen_from || key + L::KEYS > seen_to;
        float scores[L::KEY_TILES][4];
        score<L>(scores, queries, L::keys(stage));
        if (some_unseen) hide<L>(scores, sight_of<L>(call, rows), key);
        float largest[2], bases[2];
        largest_of<L>(largest, scores);
        rescale(sums, bases, largest, call.scale);
        u32 weights[L::KEY_TILES][2];
        weigh<L>(weights, scores, bases, call.scale);
        if (L::SHARE > 1) {
            store_weights<L>(L::weights(), weights);
            copy_wait<2 * (L::STAGES - 1)>();
            __syncthreads();
        }
        if (some_unseen && first_position != last_position)
            set_unbounded_apart<L>(sums, sight_of<L>(call, rows), key, weights, L::keys(stage), L::values(stage));
        add_values<L>(sums, weights, L::values(stage));
        stage = stage + 1 == L::STAGES ? 0 : stage + 1;
    }
    join_sums(total, sums);
}

// ---- Results ----

// Divides, and writes the rows: heads side by side, then zeros up to the stride.
template <class L> DEVICE void store_rows(const Call& call, const RowTile& rows, const Sums<L>& total) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = L::lane_row() + 8 * half;
        if (!rows.holds(row)) continue;
        u32 head = rows.query_head(row), first_dim = L::share() * L::WARP_DIMS + lane_index() % 4 * 2;
        bf16* out = call.out + (u64)(rows.span.row + rows.token(row)) * call.out_stride;
        float factor = output_factor(total.maximum[half], total.weights[2 * half], sink_of(call, head));
#pragma unroll
        for (u32 tile = 0; tile < L::DIM_TILES; tile++) {
            u32 dim = first_dim + tile * 8;
            if (dim < call.head_dim)
                store_4(out + head * call.head_dim + dim, pack_bf16(output_of(total.values[tile][2 * half], factor),
                                                                output_of(total.values[tile][2 * half + 1], factor)));
        }
        if (head + 1 == call.query_heads && L::share() == 0)
            for (u32 at = call.query_heads * call.head_dim + lane_index() % 4; at < call.out_stride; at += 4)
                out[at] = bf16{0};
    }
}
