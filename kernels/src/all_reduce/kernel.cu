// Sums and exchanges among ranks that read each other's memory.
//
//   one shot:   out[i] = ((buffer of rank 0)[i] + (buffer of rank 1)[i]) + ..., every rank reads all buffers
//   fused:      the same sum, added to the residual, then RMS normalisation of the row; see `rms_norm`
//   two shots:  rank r sums part r into its own buffer, then every rank reads every part from its owner
//   gather:     out[row] = (row of rank 0's buffer, row of rank 1's buffer, ...)
//
// Every sum runs from rank 0 to the last rank, so that all ranks hold the same bits, whichever way they came by them.
//
// Mapping: a thread takes 16 bytes at a time (one element where rows do not start on 16 bytes), of up to eight ranks at
// once, so that eight reads are on their way before the first is waited for. Element i belongs to the block of the same
// index on every rank. In the fused kernel a block takes whole rows.
//
// Bytes that a rank reads from others, n being the bytes of the whole and N the ranks: one shot (N - 1) n, two shots
// 2 (N - 1) / N n, gather (N - 1) / N n. Below some 100 KB time goes into waiting: one barrier and one read across the
// link for one shot, two of each for two. Designed for the latency of these (2 to 3 us a barrier) when small, and for
// 80 % of a link's rate when large: 64 blocks of 256 threads have up to 2 MB of reads on their way, and a link of
// 450 GB/s with a latency of 2 us needs 0.9 MB.
//
// Order and memory: block b of a rank meets block b of every other rank at barriers of ascending number. Before it
// comes, what its threads have written and read is done (`__syncthreads`, then a release); after it has met the others,
// it sees what they had written (an acquire, then `__syncthreads`). Blocks of one rank never meet. All blocks must be
// able to run at the same time, so there is at most one for each multiprocessor.
//   first barrier:   everybody's kernel has begun, so everybody's input is there
//   second of two:   block b of everybody has summed its share of its part
//   last barrier:    block b of everybody has read what it needs from this rank's buffer, which may be overwritten once
//                    all blocks have ended. Left out for a caller that lets the group's next launch pass before it
//                    overwrites: nobody can be in the next launch before it has ended this one.
//
// A rank that waits looks at its abort word from time to time and counts its polls, so that a lost peer ends the wait.
// It then notes who was missing and leaves; the output is not to be used, and every later launch of the rank leaves at
// once until the areas of all ranks are zeroed. The barriers' number lives in device memory and wraps around, so a
// captured launch may be replayed for ever.
//
// Versions: this is the first. It has not yet run on a card.
#include "prelude.cuh"

constexpr u32 PEERS_MAX = 16;
constexpr u32 BLOCKS_MAX = 64;

// What peers write to and what a rank remembers. All zero before the group's first launch.
struct Area {
    // The last barrier to which block b of peer p has come: written by that peer.
    u32 arrived[BLOCKS_MAX][PEERS_MAX];
    // The last barrier that block b of this rank has passed.
    u32 passed[BLOCKS_MAX];
    // Why the rank stopped (0: it did not), in which block, at which barrier, waiting for whom.
    u32 stopped, block, barrier, peer;
};
static_assert(sizeof(Area) == 4 * (BLOCKS_MAX * PEERS_MAX + BLOCKS_MAX + 4), "as cuda.rs has it");

enum Stopped { RUNNING, ABORTED, PEER_LATE };

struct Peers {
    float* buffers[PEERS_MAX];
    Area* areas[PEERS_MAX];
    const u32* abort;
    u32 rank, count;
    // Polls after which a peer is taken to be lost.
    u32 polls_max;
    // Whether the buffer may be overwritten as soon as the launch has ended.
    u32 last_barrier;
};

DEVICE Area& own_area(const Peers& peers) { return *peers.areas[peers.rank]; }

// ---- Barriers between ranks ----

// Finds the number of the last barrier; false where the rank has stopped before.
DEVICE bool begin(const Peers& peers, u32& barrier) {
    barrier = own_area(peers).passed[blockIdx.x];
    bool stopped = threadIdx.x == 0 && load_relaxed_system(&own_area(peers).stopped) != RUNNING;
    return !__syncthreads_or(stopped);
}

// Tells every rank that this block has come to `barrier`.
DEVICE void arrive(const Peers& peers, u32 barrier) {
    __syncthreads();
    if (threadIdx.x < peers.count)
        store_release_system(&peers.areas[threadIdx.x]->arrived[blockIdx.x][peers.rank], barrier);
}

// The first to stop says why.
DEVICE void stop(const Peers& peers, Stopped why, u32 barrier, u32 peer) {
    Area& area = own_area(peers);
    if (atomicCAS(&area.stopped, (u32)RUNNING, (u32)why) != RUNNING) return;
    area.block = blockIdx.x;
    area.barrier = barrier;
    area.peer = peer;
}

// The abort word lies in the host's memory, a microsecond away.
constexpr u32 POLLS_BETWEEN_LOOKS = 128;

DEVICE bool await_peer(const Peers& peers, u32 barrier, u32 peer) {
    Area& area = own_area(peers);
    for (u32 polls = 1;; polls++) {
        // A difference, since numbers wrap around; a peer may be ahead.
        if ((i32)(load_acquire_system(&area.arrived[blockIdx.x][peer]) - barrier) >= 0) return true;
        if (polls >= peers.polls_max) {
            stop(peers, PEER_LATE, barrier, peer);
            return false;
        }
        if (polls % POLLS_BETWEEN_LOOKS != 0) continue;
        if (load_relaxed_system(&area.stopped) != RUNNING) return false;
        if (load_relaxed_system(peers.abort) != 0) {
            stop(peers, ABORTED, barrier, peer);
            return false;
        }
    }
}

// Waits until every rank has come to `barrier`; false, for all threads of the block, where the rank stops.
DEVICE bool await(const Peers& peers, u32 barrier) {
    bool here = threadIdx.x >= peers.count || await_peer(peers, barrier, threadIdx.x);
    return __syncthreads_and(here);
}

DEVICE bool meet(const Peers& peers, u32 barrier) {
    arrive(peers, barrier);
    return await(peers, barrier);
}

// Remembers `barrier` for the next launch. Threads have read the number before at least one `__syncthreads`.
DEVICE void remember(const Peers& peers, u32 barrier) {
    if (threadIdx.x == 0) own_area(peers).passed[blockIdx.x] = barrier;
}

// Ends a launch whose last barrier so far was `barrier`.
DEVICE void finish(const Peers& peers, u32 barrier) {
    if (peers.last_barrier && !meet(peers, ++barrier)) return;
    remember(peers, barrier);
}

// ---- Neighbouring elements ----

// Four elements, accessed as 16 aligned bytes, or one.
template <u32 COUNT> struct Pack {
    float x[COUNT];
};

DEVICE Pack<4> unpack(uint4 bits) {
    float4 v = as_floats(bits);
    return {{v.x, v.y, v.z, v.w}};
}

template <u32 COUNT> DEVICE Pack<COUNT> load(const float* from) {
    if constexpr (COUNT == 4)
        return unpack(load_16(from));
    else
        return {{*from}};
}

template <u32 COUNT> DEVICE Pack<COUNT> load_from_peer(const float* from) {
    if constexpr (COUNT == 4)
        return unpack(load_coherent(from));
    else
        return {{__uint_as_float(load_relaxed_system(reinterpret_cast<const u32*>(from)))}};
}

template <u32 COUNT> DEVICE void store(float* to, const Pack<COUNT>& pack) {
    if constexpr (COUNT == 4)
        store_16(to, as_bits(make_float4(pack.x[0], pack.x[1], pack.x[2], pack.x[3])));
    else
        *to = pack.x[0];
}

template <u32 COUNT> DEVICE Pack<COUNT> add(Pack<COUNT> a, const Pack<COUNT>& b) {
#pragma unroll
    for (u32 at = 0; at < COUNT; at++) a.x[at] += b.x[at];
    return a;
}

// ---- Sums ----

constexpr u32 PEERS_AT_ONCE = 8;

// The sum over ranks of the elements from `element` on.
template <u32 COUNT> DEVICE Pack<COUNT> sum_over_peers(const Peers& peers, u64 element) {
    Pack<COUNT> sum = {};
    for (u32 first = 0; first < peers.count; first += PEERS_AT_ONCE) {
        Pack<COUNT> parts[PEERS_AT_ONCE] = {};
#pragma unroll
        for (u32 at = 0; at < PEERS_AT_ONCE; at++)
            if (first + at < peers.count) parts[at] = load_from_peer<COUNT>(peers.buffers[first + at] + element);
#pragma unroll
        for (u32 at = 0; at < PEERS_AT_ONCE; at++)
            if (first + at < peers.count) sum = first + at == 0 ? parts[at] : add(sum, parts[at]);
    }
    return sum;
}

// A buffer of `length` elements is `quads` times four, of which the last may be in part beyond the end.
DEVICE bool is_whole(u64 quad, u32 length) { return quad * 4 + 4 <= length; }

DEVICE void sum_quad(const Peers& peers, u64 quad, u32 length, float* out) {
    if (is_whole(quad, length))
        store(out + quad * 4, sum_over_peers<4>(peers, quad * 4));
    else
        for (u64 at = quad * 4; at < length; at++) store(out + at, sum_over_peers<1>(peers, at));
}

KERNEL(all_reduce_one_shot_f32, 256, 1, (const Peers peers, u32 length, float* __restrict__ out)) {
    u32 barrier;
    if (!begin(peers, barrier)) return;
    if (!meet(peers, ++barrier)) return;
    u32 quads = divide_up((u64)length, (u64)4);
    for (u32 quad = blockIdx.x * blockDim.x + threadIdx.x; quad < quads; quad += gridDim.x * blockDim.x)
        sum_quad(peers, quad, length, out);
    finish(peers, barrier);
}

// ---- Two shots ----

// Part p is the quads from `p * part` on. Copies quad `offset` of every part.
DEVICE void collect_quads(const Peers& peers, u32 part, u32 offset, u32 length, float* out) {
    for (u32 first = 0; first < peers.count; first += PEERS_AT_ONCE) {
        Pack<4> quads[PEERS_AT_ONCE] = {};
#pragma unroll
        for (u32 at = 0; at < PEERS_AT_ONCE; at++) {
            u64 quad = (u64)(first + at) * part + offset;
            if (first + at < peers.count && is_whole(quad, length))
                quads[at] = load_from_peer<4>(peers.buffers[first + at] + quad * 4);
        }
#pragma unroll
        for (u32 at = 0; at < PEERS_AT_ONCE; at++) {
            u64 quad = (u64)(first + at) * part + offset;
            if (first + at < peers.count && is_whole(quad, length)) store(out + quad * 4, quads[at]);
        }
    }
}

// Copies the elements beyond the last whole quad, if they have this offset in their part.
DEVICE void collect_rest(const Peers& peers, u32 part, u32 offset, u32 length, float* out) {
    u32 quad = length / 4, owner = quad / part;
    if (quad % part != offset) return;
    for (u64 at = (u64)quad * 4; at < length; at++) store(out + at, load_from_peer<1>(peers.buffers[owner] + at));
}

KERNEL(all_reduce_two_shot_f32, 256, 1, (const Peers peers, u32 length, float* __restrict__ out)) {
    u32 barrier;
    if (!begin(peers, barrier)) return;
    if (!meet(peers, ++barrier)) return;
    u32 quads = divide_up((u64)length, (u64)4), part = divide_up(quads, peers.count);
    u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    // Nobody else reads or writes this part of this buffer before the barrier.
    float* own = peers.buffers[peers.rank];
    for (u32 offset = first; offset < part; offset += step) {
        u64 quad = (u64)peers.rank * part + offset;
        if (quad < quads) sum_quad(peers, quad, length, own);
    }
    if (!meet(peers, ++barrier)) return;
    for (u32 offset = first; offset < part; offset += step) {
        collect_quads(peers, part, offset, length, out);
        collect_rest(peers, part, offset, length, out);
    }
    finish(peers, barrier);
}

// ---- Sum, residual and normalisation ----

// Adds the sum over ranks to a row of the residual, which is also kept in `held`. Returns this thread's sum of squares.
template <u32 COUNT>
DEVICE float add_row(const Peers& peers, u32 row, u32 width, float* __restrict__ residual, float* held) {
    float squares = 0;
    for (u32 column = threadIdx.x * COUNT; column < width; column += blockDim.x * COUNT) {
        u64 at = (u64)row * width + column;
        Pack<COUNT> before = load<COUNT>(residual + at);
        Pack<COUNT> value = add(before, sum_over_peers<COUNT>(peers, at));
        store(residual + at, value);
        store(held + column, value);
#pragma unroll
        for (u32 lane = 0; lane < COUNT; lane++) squares = plus_square(squares, value.x[lane]);
    }
    return squares;
}

DEVICE float normalised(float value, float scale, float weight) { return to_float(to_bf16(value * scale)) * weight; }

// Each thread reads what it has itself put into `held`. Columns from `width` to `stride` are zero.
template <u32 COUNT>
DEVICE void normalise_row(const float* held, float scale, const float* __restrict__ weight, u32 width,
                          bf16* __restrict__ out, u32 stride) {
    for (u32 column = threadIdx.x * COUNT; column < stride; column += blockDim.x * COUNT) {
        Pack<COUNT> value = {};
        if (column < width) {
            Pack<COUNT> x = load<COUNT>(held + column), w = load<COUNT>(weight + column);
#pragma unroll
            for (u32 lane = 0; lane < COUNT; lane++) value.x[lane] = normalised(x.x[lane], scale, w.x[lane]);
        }
        if constexpr (COUNT == 4)
            store_8(out + column, make_uint2(pack_bf16(value.x[0], value.x[1]), pack_bf16(value.x[2], value.x[3])));
        else
            out[column] = to_bf16(value.x[0]);
    }
}

constexpr u32 SCRATCH_BYTES = 32 * sizeof(float);

// False where the rank stops.
template <u32 COUNT>
DEVICE bool add_and_normalise(const Peers& peers, u32 barrier, u32 rows, u32 width, float* __restrict__ residual,
                              const float* __restrict__ weight, float eps, bf16* __restrict__ out, u32 stride) {
    float* scratch = shared_memory<float>();
    float* held = shared_memory<float>(SCRATCH_BYTES);
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        float squares = add_row<COUNT>(peers, row, width, residual, held);
        // After its last row a block needs its peers no more: they hear of it while it normalises.
        if (peers.last_barrier && row + gridDim.x >= rows) arrive(peers, barrier);
        float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
        normalise_row<COUNT>(held, scale, weight, width, out + (u64)row * stride, stride);
        // `scratch` is free for the next row.
        __syncthreads();
    }
    return !peers.last_barrier || await(peers, barrier);
}

// dynamic shared memory: all_reduce_rms_norm_bf16 101376 bytes
KERNEL(all_reduce_rms_norm_bf16, 1024, 1,
       (const Peers peers, u32 rows, u32 width, float* __restrict__ residual, const float* __restrict__ weight,
        float eps, bf16* __restrict__ out, u32 stride)) {
    u32 barrier;
    if (!begin(peers, barrier)) return;
    if (!meet(peers, ++barrier)) return;
    barrier += peers.last_barrier;
    bool done = width % 4 == 0
                    ? add_and_normalise<4>(peers, barrier, rows, width, residual, weight, eps, out, stride)
                    : add_and_normalise<1>(peers, barrier, rows, width, residual, weight, eps, out, stride);
    if (done) remember(peers, barrier);
}

// ---- Gather ----

// Columns of rank p: from `starts[p]` to `starts[p + 1]`. Ranks that are not there have none.
struct Columns {
    u32 starts[PEERS_MAX + 1];
};

constexpr u32 PACKS_AT_ONCE = 4;

DEVICE const float* owned_element(const Peers& peers, const Columns& columns, u32 row, u32 column) {
    u32 owner = 0, start = 0, end = columns.starts[1];
    // All indices are constants: neighbours in a warp have different owners, and parameters cannot be indexed so.
#pragma unroll
    for (u32 peer = 1; peer < PEERS_MAX; peer++)
        if (column >= columns.starts[peer]) {
            owner = peer;
            start = columns.starts[peer];
            end = columns.starts[peer + 1];
        }
    return peers.buffers[owner] + (u64)row * (end - start) + (column - start);
}

template <u32 COUNT>
DEVICE void gather_rows(const Peers& peers, const Columns& columns, u32 rows, float* __restrict__ out) {
    u32 width = columns.starts[peers.count] / COUNT, step = gridDim.x * blockDim.x;
    u64 packs = (u64)rows * width;
    for (u64 first = blockIdx.x * blockDim.x + threadIdx.x; first < packs; first += step * PACKS_AT_ONCE) {
        Pack<COUNT> values[PACKS_AT_ONCE] = {};
#pragma unroll
        for (u32 at = 0; at < PACKS_AT_ONCE; at++) {
            u64 pack = first + at * step;
            if (pack >= packs) continue;
            u32 row = (u32)pack / width, column = (u32)pack % width * COUNT;
            values[at] = load_from_peer<COUNT>(owned_element(peers, columns, row, column));
        }
#pragma unroll
        for (u32 at = 0; at < PACKS_AT_ONCE; at++)
            if (first + at * step < packs) store(out + (first + at * step) * COUNT, values[at]);
    }
}

KERNEL(all_gather_f32, 256, 1,
       (const Peers peers, const Columns columns, u32 rows, u32 in_fours, float* __restrict__ out)) {
    u32 barrier;
    if (!begin(peers, barrier)) return;
    if (!meet(peers, ++barrier)) return;
    if (in_fours)
        gather_rows<4>(peers, columns, rows, out);
    else
        gather_rows<1>(peers, columns, rows, out);
    finish(peers, barrier);
}
