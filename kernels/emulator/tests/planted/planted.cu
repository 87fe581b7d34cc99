// Kernels with one mistake each, beside the same kernel without it. All turn a row of 128 floats around, or add one to
// each, so that one driver knows what must come out.
#include "prelude.cuh"

#define PLANTED(name) KERNEL(name, 128, 1, (const float* in, float* out, u32* flag))

constexpr u32 COUNT = 128;

template <bool BARRIER> DEVICE void reverse(const float* in, float* out) {
    float* row = shared_memory<float>();
    row[threadIdx.x] = in[threadIdx.x];
    if (BARRIER) __syncthreads();
    out[threadIdx.x] = row[COUNT - 1 - threadIdx.x];
}

PLANTED(reverse_right) { reverse<true>(in, out); }
PLANTED(reverse_without_barrier_before_the_read) { reverse<false>(in, out); }

// The same in four rounds over one buffer of 32: what was read must be read by all before it is overwritten.
template <bool BARRIER> DEVICE void reverse_in_rounds(const float* in, float* out) {
    float* part = shared_memory<float>();
    for (u32 round = 0; round < 4; round++) {
        if (threadIdx.x / 32 == round) part[threadIdx.x % 32] = in[threadIdx.x];
        __syncthreads();
        if (threadIdx.x / 32 == 3 - round) out[threadIdx.x] = part[31 - threadIdx.x % 32];
        if (BARRIER) __syncthreads();
    }
}

PLANTED(rounds_right) { reverse_in_rounds<true>(in, out); }
PLANTED(rounds_without_barrier_before_the_write) { reverse_in_rounds<false>(in, out); }

template <int PENDING> DEVICE void reverse_copied(const float* in, float* out) {
    float* row = shared_memory<float>();
    if (threadIdx.x < COUNT / 4) copy_async_16(row + 4 * threadIdx.x, in + 4 * threadIdx.x);
    copy_commit();
    copy_wait<PENDING>();
    __syncthreads();
    out[threadIdx.x] = row[COUNT - 1 - threadIdx.x];
    copy_wait<0>();
}

PLANTED(copied_right) { reverse_copied<0>(in, out); }
PLANTED(copied_without_wait) { reverse_copied<1>(in, out); }

PLANTED(reads_beyond_the_end) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x == 5) out[5] += in[COUNT + 4] * 0.0f;
}

PLANTED(writes_beyond_the_end) {
    out[COUNT - 1 - threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x == 6) out[COUNT + 4] = 1.0f;
}

PLANTED(writes_beyond_shared_memory) {
    reverse<true>(in, out);
    if (threadIdx.x == 7) shared_memory<float>()[COUNT + 1] = 1.0f;
}

PLANTED(reads_misaligned) { out[threadIdx.x] = __uint_as_float(load_16(in + 1).x); }

PLANTED(matrix_from_global_memory) {
    u32 out_of[4];
    load_matrices(out_of, in);
    out[threadIdx.x] = __uint_as_float(out_of[0]);
}

PLANTED(copy_from_shared_memory) {
    copy_async_16(shared_memory<float>(), shared_memory<float>() + 4);
    copy_commit();
    copy_wait<0>();
    out[threadIdx.x] = in[threadIdx.x];
}

PLANTED(global_load_from_shared_memory) { out[threadIdx.x] = __uint_as_float(load_once(shared_memory<float>()).x); }

PLANTED(divergent_barrier) {
    if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        out[threadIdx.x] = 0.0f;
        __syncthreads();
    }
    reverse<true>(in, out);
}

PLANTED(absent_lanes) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x >= 40) return;
    out[threadIdx.x] += 0.0f * __shfl_xor_sync(ALL_LANES, in[threadIdx.x], 1);
}

PLANTED(divergent_warp) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x % 2) __syncwarp();
    else out[threadIdx.x] += 0.0f * __shfl_xor_sync(ALL_LANES, in[threadIdx.x], 2);
}

PLANTED(leaves_before_the_barrier) {
    if (threadIdx.x == 9) return;
    reverse<true>(in, out);
}

PLANTED(leaves_with_copies_under_way) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x == 10) {
        copy_async_16(shared_memory<float>(), in);
        copy_commit();
    }
}

PLANTED(waits_for_ever) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x == 11)
        while (load_acquire_system(flag) == 0) spin_pause();
}

PLANTED(waits_for_ever_by_exchange) {
    out[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
    if (threadIdx.x == 12)
        while (atomicCAS(flag, 1u, 2u) != 1) {
        }
}

// Block 0 reverses and raises the flag; block 1 waits for it and copies what it finds.
template <bool ORDERED> DEVICE void hand_over(const float* in, float* out, u32* flag) {
    float* handed = out + COUNT;
    if (blockIdx.x == 0) {
        handed[threadIdx.x] = in[COUNT - 1 - threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) {
            if (ORDERED) store_release_system(flag, 1);
            else __atomic_store_n(flag, 1, __ATOMIC_RELAXED), emulator::progress();
        }
    } else {
        if (threadIdx.x == 0)
            while ((ORDERED ? load_acquire_system(flag) : load_relaxed_system(flag)) == 0) spin_pause();
        __syncthreads();
        out[threadIdx.x] = handed[threadIdx.x];
    }
}

PLANTED(flag_right) { hand_over<true>(in, out, flag); }
PLANTED(flag_unordered) { hand_over<false>(in, out, flag); }
