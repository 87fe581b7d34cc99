// Which tokens min-p, top-k and top-p leave, as the least place that stays; or a rank's best candidates.
//
//   min-p: l >= largest + ln(min_p);  top-k: l >= the k-th largest;
//   top-p: the least likely go while their weights sum to at most (1 - p) of all that are left; ties: higher ids first.
//
// l is the logit divided by the temperature, a weight floor(2^40 e^(l - largest)): sums are integers, equal to the
// CPU's.
//
// Mapping: a block takes one chunk of one row and counts tokens and weights in 2048 bins of 1/64 below the largest, in
// shared memory, then adds them to the row's bins in global memory. The row's last block to arrive finds the bin in
// which k or the mass ends, reads the row again for that bin's tokens, and compares these with each other; where they
// are more than 1024 (many equal logits), it first counts up to eight digits of eight bits, reading the row for each.
// So a row is read once by all and once or twice by one block, from the L2: some 8 us for 200,000 logits. Moves 4 bytes
// a logit and pass, about 40 operations in the first (the exponential). Designed for 50 % of bandwidth in the first
// pass, and for latency in the rest. It has not yet run on a card.
#include "prelude.cuh"
#include "sampling.cuh"
#include "selection.cuh"

// The tokens of a slice that -inf and min-p leave.
struct RowSource {
    Logits logits;
    const Row& row;
    u64 floor;

    template <class Use> DEVICE void each(u32 begin, u32 end, Use use) const {
        logits.each(begin, end, [&](float logit, u32 token) {
            u64 place = place_of(scaled(logit, row), token);
            if (place >= floor) use(place);
        });
    }

    // Of the whole slice, the wanted ones.
    template <class Wanted, class Use> DEVICE void each_where(Wanted wanted, Use use) const {
        logits.each_where(0, logits.width, [&](float logit, u32 token) {
            u64 place = place_of(scaled(logit, row), token);
            return place >= floor && wanted(place);
        }, [&](float logit, u32 token) { use(place_of(scaled(logit, row), token)); });
    }
};

// A row's bins in global memory; zero between launches.
struct RowBins {
    u32* counts;
    u64* masses;
};

// Adds the chunk to the row's bins. The last bin has no weight, and may hold most of a row: counted without atomics.
DEVICE void count_chunk(const RowSource& source, u32 begin, u32 end, float largest, RowBins bins, const Bench& at) {
    at.bins.clear(BINS);
    __syncthreads();
    u32 far = 0;
    source.each(begin, end, [&](u64 place) {
        float distance = distance_of(value_at(place), largest);
        u32 bin = bin_of(distance);
        if (bin == BINS - 1) far++;
        else at.bins.add(bin, weight_at(distance));
    });
    far = (u32)block_total(far, at.scratch);
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        Amount amount = at.bins.of(bin);
        u32 count = (u32)amount.count + (bin == BINS - 1 ? far : 0);
        if (count) atomicAdd(&bins.counts[bin], count);
        if (amount.mass) atomicAdd(&bins.masses[bin], amount.mass);
    }
}

DEVICE void take_bins(RowBins bins, const Bench& at) {
    for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        u64 mass = bins.masses[bin];
        at.bins.counts[bin] = bins.counts[bin];
        at.bins.low[bin] = (u32)mass;
        at.bins.high[bin] = (u32)(mass >> 32);
        bins.counts[bin] = 0;
        bins.masses[bin] = 0;
    }
    __syncthreads();
}

// dynamic shared memory: sampling_select 44928 bytes
KERNEL(sampling_select, 512, 2,
       (const float* logits, u32 width, u32 first, u32 chunk, const Row* rows, const u64* standings, u32 ranks,
        u32* arrived, u32* counts, u64* masses, u64* thresholds)) {
    Bench at = bench();
    u32 row = blockIdx.y, begin = min(blockIdx.x * chunk, width), end = min(begin + chunk, width);
    const Row request = rows[row];
    u64 best = best_of_ranks(standings, ranks, gridDim.y, row);
    if (request.flags & GREEDY || !is_filtered(request) || best < FIRST_PLACE) return;
    float largest = value_at(best);
    RowSource source = {{logits + (u64)row * width, width, first}, request, floor_of(request, largest)};
    RowBins bins = {counts + row * BINS, masses + row * BINS};
    count_chunk(source, begin, end, largest, bins, at);
    if (!block_arrives_last(arrived + row, gridDim.x)) return;
    take_bins(bins, at);
    Amount total = total_of(at.bins, BINS, at);
    bool complete;
    u64 threshold = threshold_of(source, request, largest, total, total, at, complete);
    if (threadIdx.x == 0) thresholds[row] = threshold;
}

// A rank's candidates of a row: a head of four numbers, then `capacity` places in no order, zero where there are none.
constexpr u32 HEAD = 4; // The best place left out, or 0; tokens that -inf and min-p leave; their weights; unused.

// Lists every place from `least` on and returns the best one below.
DEVICE u64 write_candidates(const RowSource& source, u64 least, u32 capacity, u64* places, const Bench& at) {
    __syncthreads();
    if (threadIdx.x == 0) at.found->listed = 0;
    __syncthreads();
    u64 left_out = 0;
    source.each_where([&](u64 place) {
        if (place < least) left_out = max(left_out, place);
        return place >= least;
    }, [&](u64 place) {
        u32 to = atomicAdd(&at.found->listed, 1u);
        if (to < capacity) places[to] = place;
    });
    left_out = block_largest(left_out, at.scratch);
    for (u32 unused = at.found->listed + threadIdx.x; unused < capacity; unused += blockDim.x) places[unused] = 0;
    return left_out;
}

// dynamic shared memory: sampling_candidates 44928 bytes
KERNEL(sampling_candidates, 512, 2,
       (const float* logits, u32 width, u32 first, u32 chunk, const Row* rows, const u64* standings, u32 ranks,
        u32* arrived, u32* counts, u64* masses, u32 capacity, u64* candidates)) {
    Bench at = bench();
    u32 row = blockIdx.y, begin = min(blockIdx.x * chunk, width), end = min(begin + chunk, width);
    const Row request = rows[row];
    u64 best = best_of_ranks(standings, ranks, gridDim.y, row);
    if (request.flags & GREEDY || !is_filtered(request) || best < FIRST_PLACE) return;
    float largest = value_at(best);
    RowSource source = {{logits + (u64)row * width, width, first}, request, floor_of(request, largest)};
    RowBins bins = {counts + row * BINS, masses + row * BINS};
    count_chunk(source, begin, end, largest, bins, at);
    if (!block_arrives_last(arrived + row, gridDim.x)) return;
    take_bins(bins, at);
    Amount total = total_of(at.bins, BINS, at);
    u64 least = 0;
    if (total.count > capacity)
        least = find_boundary<false>(source, largest, capacity, LAST_ID_DIGIT, at).place;
    u64* of_row = candidates + (u64)row * (HEAD + capacity);
    u64 left_out = write_candidates(source, least, capacity, of_row + HEAD, at);
    if (threadIdx.x == 0) of_row[0] = left_out, of_row[1] = total.count, of_row[2] = total.mass, of_row[3] = 0;
}
