// The tokens of rows whose vocabulary is cut over several ranks, from what the ranks found in their slices.
//
// A greedy row takes the best standing, a row without top-k and top-p the best draw, both exact. Any other row takes
// its candidates: every rank's best `capacity` tokens with the weight and number of all. The thresholds found among
// them are those of the whole row if no rank left out a token as good; otherwise the row is marked incomplete and gets
// no token, and the caller gathers its logits.
//
// Mapping: one block per row, over `ranks * capacity` places of 8 bytes in global memory, read three to five times from
// the L2. Bound by latency, about 10 us. It has not yet run on a card.
#include "prelude.cuh"
#include "sampling.cuh"
#include "selection.cuh"

constexpr u32 HEAD = 4; // As `sampling_candidates` writes it.

// The candidates of one row: [ranks][rows][HEAD + capacity].
struct CandidateSource {
    const u64* of_row;
    u64 apart;
    u32 ranks, capacity;

    template <class Wanted, class Use> DEVICE void each_where(Wanted wanted, Use use) const {
        for (u32 rank = 0; rank < ranks; rank++)
            for (u32 at = threadIdx.x; at < capacity; at += blockDim.x) {
                u64 place = of_row[rank * apart + HEAD + at];
                if (place >= FIRST_PLACE && wanted(place)) use(place);
            }
    }
};

// The row's token, in thread 0, and whether the candidates suffice.
DEVICE u32 draw_candidate(const CandidateSource& source, const Row& row, u64 best, bool& complete, const Bench& at) {
    float largest = value_at(best);
    at.bins.clear(BINS);
    __syncthreads();
    source.each_where([](u64) { return true; }, [&](u64 place) {
        float distance = distance_of(value_at(place), largest);
        at.bins.add(bin_of(distance), weight_at(distance));
    });
    __syncthreads();
    u64 left_out = 0;
    Amount total = {0, 0}, known = total_of(at.bins, BINS, at);
    for (u32 rank = 0; rank < source.ranks; rank++) {
        const u64* head = source.of_row + rank * source.apart;
        left_out = max(left_out, head[0]);
        total = total + Amount{head[1], head[2]};
    }
    u64 threshold = threshold_of(source, row, largest, total, known, at, complete);
    complete = complete && threshold > left_out;
    if (!complete) return NO_TOKEN;
    Leader leader;
    leader.set(noisy(largest, random_bits(row.key, token_at(best))), token_at(best));
    source.each_where([&](u64 place) {
        return place >= threshold && place != best && leader.may_lose_to(row.key, value_at(place), token_at(place));
    }, [&](u64 place) { leader.challenge(row.key, value_at(place), token_at(place)); });
    __syncthreads();
    return block_leader(leader.value, leader.token, shared_memory<Draw>()).token;
}

// dynamic shared memory: sampling_merge 44928 bytes
KERNEL(sampling_merge, 512, 1,
       (const Row* rows, const u64* standings, u32 ranks, const Draw* draws, const u64* candidates, u32 capacity,
        u32* tokens, u32* incomplete)) {
    u32 row = blockIdx.x;
    const Row request = rows[row];
    u64 best = best_of_ranks(standings, ranks, gridDim.x, row);
    u32 token = NO_TOKEN;
    bool complete = true;
    if (best >= FIRST_PLACE && request.flags & GREEDY) {
        token = token_at(best);
    } else if (best >= FIRST_PLACE && !is_filtered(request)) {
        Draw drawn = draws[row];
        for (u32 rank = 1; rank < ranks; rank++) {
            Draw other = draws[(u64)rank * gridDim.x + row];
            if (beats(other.value, other.token, drawn.value, drawn.token)) drawn = other;
        }
        token = drawn.token;
    } else if (best >= FIRST_PLACE) {
        u64 of_rank = HEAD + capacity;
        CandidateSource source = {candidates + row * of_rank, gridDim.x * of_rank, ranks, capacity};
        token = draw_candidate(source, request, best, complete, bench());
    }
    if (threadIdx.x == 0) tokens[row] = token, incomplete[row] = !complete;
}
