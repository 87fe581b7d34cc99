// One draw per row among the tokens that the filters left.
//
//   token = argmax of l - ln(-ln u), ties to the lowest id; u in (0, 1) from 52 bits of mix(seed, position, token)
//
// Mapping: a block takes one chunk of one row; the best of a thread, a block and, by the last block to arrive, the row.
// Every thread begins with the noisy logit of the likeliest token, so that nearly all others are out of reach: more
// than 37 below it without a random number, or by a bound in f32. Only the few others are read again and take two
// logarithms in f64, which are the CPU's operation by operation: the same bits, so the same token. Moves 4 bytes a
// logit; some 30 integer operations for those in reach: bound by memory where distributions are peaked. Designed for 60
// % of bandwidth. It has not yet run on a card.
#include "prelude.cuh"
#include "sampling.cuh"

// The draw of one chunk, in thread 0: at least that of the row's likeliest token.
DEVICE Draw draw_chunk(const Logits& logits, u32 begin, u32 end, const Row& row, u64 best, u64 threshold,
                       Draw* scratch) {
    if (threadIdx.x == 0) scratch->value = noisy(value_at(best), random_bits(row.key, token_at(best)));
    __syncthreads();
    Leader leader;
    leader.set(scratch->value, token_at(best));
    __syncthreads();
    logits.each_where(begin, end, [&](float logit, u32 token) {
        float value = scaled(logit, row);
        return place_of(value, token) >= threshold && token != token_at(best) &&
               leader.may_lose_to(row.key, value, token);
    }, [&](float logit, u32 token) { leader.challenge(row.key, scaled(logit, row), token); });
    return block_leader(leader.value, leader.token, scratch);
}

// With `tokens`, the row's token, whatever its kind. Without, for a slice of the vocabulary, the draws of rows without
// top-k and top-p; of the others nothing is known yet.
// dynamic shared memory: sampling_draw 512 bytes
KERNEL(sampling_draw, 256, 4,
       (const float* logits, u32 width, u32 first, u32 chunk, const Row* rows, const u64* standings, u32 ranks,
        const u64* thresholds, u32* arrived, Draw* partials, u32* tokens, Draw* draws)) {
    Draw* scratch = shared_memory<Draw>();
    u32 row = blockIdx.y, begin = min(blockIdx.x * chunk, width), end = min(begin + chunk, width);
    const Row request = rows[row];
    u64 best = best_of_ranks(standings, ranks, gridDim.y, row);
    if (request.flags & GREEDY || best < FIRST_PLACE) {
        if (tokens && blockIdx.x == 0 && threadIdx.x == 0)
            tokens[row] = best < FIRST_PLACE ? NO_TOKEN : token_at(best);
        return;
    }
    if (!tokens && is_filtered(request)) return;
    u64 threshold = is_filtered(request) ? thresholds[row] : floor_of(request, value_at(best));
    Logits of_row = {logits + (u64)row * width, width, first};
    Draw drawn = draw_chunk(of_row, begin, end, request, best, threshold, scratch);
    if (threadIdx.x == 0) partials[(u64)row * gridDim.x + blockIdx.x] = drawn;
    if (!block_arrives_last(arrived + row, gridDim.x)) return;
    Draw own = partials[(u64)row * gridDim.x + min(threadIdx.x, gridDim.x - 1)];
    drawn = block_leader(own.value, own.token, scratch);
    if (threadIdx.x == 0 && tokens) tokens[row] = drawn.token;
    if (threadIdx.x == 0 && draws) draws[row] = drawn;
}
