// What a request changes in its row of logits, and the row's best token.
//
//   l = -inf if masked;  l + bias;  l / repetition if l > 0, else l * repetition;  l - frequency * count;  l - presence
//
// in this order for each entry's token, in place, with the CPU's roundings; then the greatest of l / temperature, ties
// to the lowest id, NaN as minus infinity. A greedy row's token is then known; a row without any number gets none.
//
// Mapping: a block takes one chunk of one row (x: chunks, y: rows); the host cuts rows so that all multiprocessors have
// work. The block finds its entries by bisection (they are ordered by token), changes its own chunk, reads it once in
// 16-byte loads (four under way per thread) and leaves the best place; the row's last block to arrive takes the best.
// Moves 4 bytes a logit, a few integer operations each: bound by memory. Designed for 80 % of bandwidth on rows that
// fill the card; a single row of 200,000 logits is 0.8 MB, where the launch itself dominates. It has not yet run on a
// card.
#include "prelude.cuh"
#include "sampling.cuh"

DEVICE float changed(float logit, const Entry& entry, const Row& row) {
    if (entry.kind == MASKED) return minus_infinity();
    if (entry.kind == BIASED) return __fadd_rn(logit, __uint_as_float(entry.amount));
    logit = logit > 0.0f ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
    if (entry.amount > 0) {
        logit = __fsub_rn(logit, __fmul_rn(row.frequency, (float)entry.amount));
        logit = __fsub_rn(logit, row.presence);
    }
    return logit;
}

// Applies the row's entries whose tokens are in `begin .. end` of the slice; one thread does all of one token.
// `before`, where it is not null, gets what each token's logit was, at the token's first entry.
DEVICE void change_chunk(float* logits, u32 begin, u32 end, u32 first, const Row& row, const Entry* entries,
                         float* before) {
    if (row.first_entry == row.end_entry) return;
    u32 from = entries_before(entries, row.first_entry, row.end_entry, (u64)first + begin);
    u32 to = entries_before(entries, from, row.end_entry, (u64)first + end);
    for (u32 at = from + threadIdx.x; at < to; at += blockDim.x) {
        u32 token = entries[at].token;
        if (at > from && entries[at - 1].token == token) continue;
        float logit = logits[token - first];
        if (before) before[at] = logit;
        for (u32 next = at; next < to && entries[next].token == token; next++)
            logit = changed(logit, entries[next], row);
        logits[token - first] = logit;
    }
    __syncthreads();
}

// dynamic shared memory: sampling_survey 256 bytes
KERNEL(sampling_survey, 256, 4,
       (float* logits, u32 width, u32 first, u32 chunk, const Row* rows, const Entry* entries, float* before,
        u64* partials, u32* arrived, u64* standings, u32* tokens)) {
    u64* scratch = shared_memory<u64>();
    u32 row = blockIdx.y, begin = min(blockIdx.x * chunk, width), end = min(begin + chunk, width);
    const Row request = rows[row];
    float* values = logits + (u64)row * width;
    change_chunk(values, begin, end, first, request, entries, before);
    u64 best = 0;
    Logits{values, width, first}.each(begin, end, [&](float logit, u32 token) {
        best = max(best, place_of(scaled(logit, request), token));
    });
    best = block_largest(best, scratch);
    u64* of_row = partials + (u64)row * gridDim.x;
    if (threadIdx.x == 0) of_row[blockIdx.x] = best;
    if (!block_arrives_last(arrived + row, gridDim.x)) return;
    best = threadIdx.x < gridDim.x ? of_row[threadIdx.x] : 0;
    best = block_largest(best, scratch);
    if (threadIdx.x != 0) return;
    standings[row] = best;
    if (tokens && best < FIRST_PLACE) tokens[row] = NO_TOKEN;
    else if (tokens && request.flags & GREEDY) tokens[row] = token_at(best);
}
