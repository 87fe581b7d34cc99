// The one header of every kernel: types, the KERNEL macro, and all instructions that C++ has no word for.
//
// Kernel texts hold no inline PTX and include nothing else, so the same text is compiled by NVRTC for a GPU and by a
// C++ compiler for the emulator, where `emulated.h` gives the same names. No CUDA header is needed.
//
// Rules of the house:
//  * Shared memory is dynamic only (`shared_memory<T>(byte offset)`): the emulator gives each block its own, poisoned.
//  * Loads and stores wider than an element go through `load_bytes<N>` and its relatives, which the emulator checks
//    for alignment.
//  * Barriers and warp operations are reached by all threads they name. A warp operation orders no memory, except
//    `__syncwarp`.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// A BF16 number: the upper half of a float.
struct alignas(2) bf16 {
    u16 bits;
};

#ifdef CONSORT_EMULATOR
#include "emulated.h"
#else

#define DEVICE __device__ __forceinline__

// `KERNEL(name, threads, blocks, (parameters)) { body }`: a kernel launched with at most `threads` threads a block, of
// which `blocks` blocks shall fit on a multiprocessor.
#define KERNEL(name, threads, blocks, parameters) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name parameters

// The block's dynamic shared memory from byte `offset` on.
template <class T> DEVICE T* shared_memory(u32 offset = 0) {
    extern __shared__ __align__(1024) unsigned char consort_shared[];
    return reinterpret_cast<T*>(consort_shared + offset);
}

DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Nearest BF16 numbers, ties to even; `low` in the lower half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

DEVICE bf16 to_bf16(float value) {
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
    return rounded;
}

// 2^x, within 2 ulp; subnormal results are zero, and 2^-inf is 0.
DEVICE float exp2_approx(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// ---- Memory ----

// 16 bytes of global memory that nobody writes during the kernel and that this block reads once: not kept in L1.
DEVICE uint4 load_once(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer));
    return v;
}

// 16 bytes of global memory that another device may have written before this kernel's acquire: never from a stale line.
DEVICE uint4 load_coherent(const void* pointer) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

// Aligned accesses of 4, 8 and 16 bytes, shared or global.
DEVICE u32 load_4(const void* pointer) { return *reinterpret_cast<const u32*>(pointer); }
DEVICE uint2 load_8(const void* pointer) { return *reinterpret_cast<const uint2*>(pointer); }
DEVICE uint4 load_16(const void* pointer) { return *reinterpret_cast<const uint4*>(pointer); }
DEVICE void store_4(void* pointer, u32 value) { *reinterpret_cast<u32*>(pointer) = value; }
DEVICE void store_8(void* pointer, uint2 value) { *reinterpret_cast<uint2*>(pointer) = value; }
DEVICE void store_16(void* pointer, uint4 value) { *reinterpret_cast<uint4*>(pointer) = value; }

// Starts a copy of 16 aligned bytes from global to shared memory, or of 16 zeros where `valid` is false (then `source`
// is not read). It is part of the thread's open group until `copy_commit` closes that.
DEVICE void copy_async_16(void* destination, const void* source, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of the thread's own groups are under way. Others see the copies after a barrier.
template <int PENDING> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Matrices ----

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane `8 m + r` gives the address of row `r` (16 aligned
// bytes) of matrix `m`; lane `l` gets in `out[m]` the elements `2 (l % 4)` and `+ 1` of row `l / 4` of matrix `m`.
DEVICE void load_matrices(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, transposed: lane `l` gets in `out[m]` the elements of rows `2 (l % 4)` and `+ 1` of column `l / 4`.
DEVICE void load_matrices_transposed(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// `d += a · b`, `a` 16 x 16 BF16, `b` 16 x 8 BF16, `d` 16 x 8 float. With `g = lane / 4` and `t = lane % 4`:
//   a[0]: row g,     columns 2t, 2t + 1       a[1]: row g + 8, columns 2t, 2t + 1
//   a[2]: row g,     columns 2t + 8, 2t + 9   a[3]: row g + 8, columns 2t + 8, 2t + 9
//   b[0]: column g,  rows 2t, 2t + 1          b[1]: column g,  rows 2t + 8, 2t + 9
//   d[0], d[1]: row g, columns 2t, 2t + 1     d[2], d[3]: row g + 8, columns 2t, 2t + 1
DEVICE void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Between blocks and devices ----

DEVICE u32 load_acquire_system(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

DEVICE void store_release_system(u32* pointer, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

DEVICE u32 load_relaxed_system(const u32* pointer) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// Adds and returns the value before; what this thread saw and wrote is visible to whoever sees the sum, and the other
// way round. For "the last block to arrive does the rest", between two `__syncthreads`.
DEVICE u32 fetch_add_device(u32* pointer, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(pointer), "r"(value)
                 : "memory");
    return before;
}

// A short rest within a spin.
DEVICE void spin_pause() { asm volatile("nanosleep.u32 64;"); }

#endif // CONSORT_EMULATOR

// ---- Common to both worlds ----

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

DEVICE u32 lane_index() { return threadIdx.x % WARP; }
DEVICE u32 warp_index() { return threadIdx.x / WARP; }

DEVICE float to_float(bf16 value) { return __uint_as_float((u32)value.bits << 16); }

// The lower and the upper of two packed BF16 numbers.
DEVICE float low_half(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float high_half(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// 16 bytes as the four floats that they are, and back.
DEVICE float4 as_floats(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
DEVICE uint4 as_bits(float4 v) {
    return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

template <class T> constexpr DEVICE T divide_up(T count, T size) { return (count + size - 1) / size; }

// Sum over a warp, the same bits in every lane: partners 16, 8, 4, 2, 1 apart.
DEVICE float warp_sum(float value) {
    for (u32 apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

// A term of a sum of squares. Fused by name, so that a compiler has no choice that would show in the bits: kernels that
// add a row's squares in the same order have the same sum.
DEVICE float plus_square(float sum, float x) { return fmaf(x, x, sum); }

// Sum over a block of whole warps, the same bits in every thread. `scratch` is shared memory for 32 floats, free for
// other use again after the next barrier.
DEVICE float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (lane_index() == 0) scratch[warp_index()] = value;
    __syncthreads();
    return warp_sum(lane_index() < blockDim.x / WARP ? scratch[lane_index()] : 0.0f);
}

// Whether this block is the last of `blocks` to come here, each once. The last one sees all that the others wrote
// before they came, and leaves the counter at zero, as the first must find it. A barrier of the block.
DEVICE bool block_arrives_last(u32* arrivals, u32 blocks) {
    __syncthreads();
    bool last = threadIdx.x == 0 && fetch_add_device(arrivals, 1) == blocks - 1;
    if (last) *arrivals = 0;
    return __syncthreads_or(last);
}
