// What log-probabilities are made of, per row that asks for them: the largest logit, the sum of e^(l - largest), the
// chosen token's logit, and the best `top` tokens, of the logits as the model gave them.
//
// Mapping: a block takes 4096 logits of one row (x: chunks, y: requests), first giving its changed logits their values
// back. The chunk lies in shared memory; its best tokens are taken in rounds, in which only the thread that held the
// winner looks for its next. The row's last block to arrive adds the chunks' sums in their order and merges their
// lists, one thread a chunk. Weights within a chunk are integers (2^-40 of the chunk's largest), sums over chunks f64;
// chunks do not depend on the launch, so neither does the sum. Moves 4 bytes a logit, about 40 operations: bound by
// memory without `top`, by some 200 cycles a round with it. Designed for 50 % of bandwidth. It has not yet run on a
// card.
#include "prelude.cuh"
#include "sampling.cuh"

constexpr u32 CHUNK = 4096;
constexpr u32 HEAD = 2; // Of a chunk: best place, weight. Of a summary: sum; largest and chosen logit.

struct Request {
    u32 row, top;
};

DEVICE void restore_chunk(float* logits, u32 begin, u32 end, u32 first, const Row& row, const Entry* entries,
                          const float* before) {
    u32 from = entries_before(entries, row.first_entry, row.end_entry, (u64)first + begin);
    u32 to = entries_before(entries, from, row.end_entry, (u64)first + end);
    for (u32 at = from + threadIdx.x; at < to; at += blockDim.x)
        if (at == from || entries[at - 1].token != entries[at].token) logits[entries[at].token - first] = before[at];
    __syncthreads();
}

// A chunk in shared memory: thread `t` owns the values `t`, `t + blockDim.x` and so on.
struct OwnValues {
    const float* values;
    u32 count, first;

    // The thread's greatest place below `limit`, 0 if there is none.
    DEVICE u64 best_below(u64 limit) const {
        u64 best = 0;
        for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
            u64 place = place_of(values[at], first + at);
            if (place < limit) best = max(best, place);
        }
        return best;
    }

    DEVICE u64 mass(float largest) const {
        u64 mass = 0;
        for (u32 at = threadIdx.x; at < count; at += blockDim.x) mass += weight_at(distance_of(values[at], largest));
        return mass;
    }
};

// [HEAD + top_max] numbers of one chunk.
DEVICE void summarize_chunk(const OwnValues& own, u32 top, u64* chunk, u64* scratch) {
    u64 mine = own.best_below(~0ull);
    u64 best = block_largest(mine, scratch);
    __syncthreads();
    u64 mass = best < FIRST_PLACE ? 0 : block_total(own.mass(value_at(best)), scratch);
    if (threadIdx.x == 0) chunk[0] = best, chunk[1] = mass;
    for (u32 round = 0; round < top; round++) {
        if (round > 0) {
            __syncthreads();
            best = block_largest(mine, scratch);
        }
        if (threadIdx.x == 0) chunk[HEAD + round] = best;
        if (mine == best && best != 0) mine = own.best_below(best);
    }
}

// The sum of e^(l - largest) over chunks, in their order.
DEVICE double sum_of_chunks(const u64* chunks, u32 count, u32 apart, float largest) {
    double sum = 0.0;
    for (u32 at = 0; at < count; at++) {
        const u64* chunk = chunks + (u64)at * apart;
        if (chunk[0] < FIRST_PLACE) continue;
        float distance = distance_of(value_at(chunk[0]), largest);
        double share = distance < 87.0f ? (double)exp_of_minus(distance) : 0.0;
        sum = __dadd_rn(sum, __dmul_rn(__ull2double_rn(chunk[1]), share));
    }
    return __dmul_rn(sum, 1.0 / (double)WEIGHT_UNIT);
}

// One thread holds the next place of one chunk's list.
DEVICE void merge_lists(const u64* chunks, u32 count, u32 apart, u32 top, u64* out, u64* scratch) {
    const u64* list = chunks + (u64)threadIdx.x * apart + HEAD;
    u32 taken = 0;
    for (u32 round = 0; round < top; round++) {
        u64 mine = threadIdx.x < count && taken < top ? list[taken] : 0;
        __syncthreads();
        u64 best = block_largest(mine, scratch);
        if (mine == best) taken++;
        if (threadIdx.x == 0) out[round] = best;
    }
}

// dynamic shared memory: sampling_summarize 16640 bytes
KERNEL(sampling_summarize, 256, 4,
       (float* logits, u32 width, u32 first, const Request* requests, const Row* rows, const Entry* entries,
        const float* before, u32 top_max, const u32* tokens, u64* partials, u32* arrived, u64* summaries)) {
    float* values = shared_memory<float>();
    u64* scratch = shared_memory<u64>(4 * CHUNK);
    u32 begin = min(blockIdx.x * CHUNK, width), end = min(begin + CHUNK, width), apart = HEAD + top_max;
    Request request = requests[blockIdx.y];
    u32 top = min(request.top, top_max);
    float* of_row = logits + (u64)request.row * width;
    if (before) restore_chunk(of_row, begin, end, first, rows[request.row], entries, before);
    Logits{of_row, width, first}.each(begin, end, [&](float logit, u32 token) {
        values[token - first - begin] = number(logit);
    });
    __syncthreads();
    u64* chunks = partials + (u64)blockIdx.y * gridDim.x * apart;
    summarize_chunk({values, end - begin, first + begin}, top, chunks + blockIdx.x * apart, scratch);
    if (!block_arrives_last(arrived + blockIdx.y, gridDim.x)) return;
    u64 best = block_largest(threadIdx.x < gridDim.x ? chunks[threadIdx.x * apart] : 0, scratch);
    u64* summary = summaries + (u64)blockIdx.y * apart;
    merge_lists(chunks, gridDim.x, apart, top, summary + HEAD, scratch);
    for (u32 at = top + threadIdx.x; at < top_max; at += blockDim.x) summary[HEAD + at] = 0;
    if (threadIdx.x != 0) return;
    float largest = best < FIRST_PLACE ? minus_infinity() : value_at(best);
    u32 token = tokens[request.row] - first;
    float chosen = token < width ? number(of_row[token]) : minus_infinity();
    double sum = sum_of_chunks(chunks, gridDim.x, apart, largest);
    summary[0] = (u64)__double_as_longlong(sum);
    summary[1] = (u64)__float_as_uint(chosen) << 32 | __float_as_uint(largest);
}
