// CUDA's words, and those of the kernels' prelude, on top of the emulator's machine. The prelude includes it in
// place of its inline PTX.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "machine.h"

#define DEVICE inline
#define __restrict__ __restrict

#define KERNEL(name, threads, blocks, parameters)                                         \
    extern "C" void name parameters;                                                       \
    static const emulator::Registration registration_of_##name{#name, threads, &name};     \
    static_assert((blocks) > 0, "at least one block per multiprocessor");                  \
    extern "C" void name parameters

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->block_size)
#define gridDim (emulator::current->grid_size)

// The line of the caller, by which a divergent barrier or warp operation is told from the one that others wait in.
#define CALLER int line = __builtin_LINE()

// ---- Types and arithmetic ----

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From> inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline u32 __float_as_uint(float value) { return same_bits<u32>(value); }
inline i32 __float_as_int(float value) { return same_bits<i32>(value); }
inline float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
inline float __int_as_float(i32 bits) { return same_bits<float>(bits); }
inline u32 __popc(u32 bits) { return (u32)__builtin_popcount(bits); }
inline i32 __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
inline i32 __ffs(u32 bits) { return __builtin_ffs((int)bits); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp2_approx(float x) { return std::exp2(x); }

// One operation, rounded to nearest and never fused with another (this file is compiled without contraction).
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __ull2double_rn(u64 value) { return (double)value; }
inline i64 __double_as_longlong(double value) { return same_bits<i64>(value); }
inline double __longlong_as_double(i64 bits) { return same_bits<double>(bits); }

// Rounded down. The difference is first rounded to f64, which differs from CUDA's where that rounding is upward and
// lands on a float.
inline float __double2float_rd(double value) {
    float nearest = (float)value;
    return nearest > value ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __fsub_rd(float a, float b) { return __double2float_rd((double)a - b); }

// Towards zero, to the ends of the range; NaN as CUDA converts it.
inline u64 __double2ull_rz(double value) {
    if (value != value) return 1ull << 63;
    return value <= 0.0 ? 0 : value >= 18446744073709551616.0 ? ~0ull : (u64)value;
}
inline u64 __float2ull_rz(float value) { return __double2ull_rz(value); }
using std::max;
using std::min;

inline bf16 to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {(u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline u32 pack_bf16(float low, float high) { return to_bf16(low).bits | (u32)to_bf16(high).bits << 16; }

// ---- Memory ----

template <class T> inline T* shared_memory(u32 offset = 0) {
    return reinterpret_cast<T*>(emulator::current->shared + offset);
}

template <class T> inline const T* aligned(const void* pointer) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) != 0)
        emulator::fault("%zu bytes at %p are not aligned", sizeof(T), pointer);
    return static_cast<const T*>(pointer);
}

inline u32 load_4(const void* pointer) { return *aligned<u32>(pointer); }
inline uint2 load_8(const void* pointer) { return *aligned<uint2>(pointer); }
inline uint4 load_16(const void* pointer) { return *aligned<uint4>(pointer); }
inline uint4 load_global(const void* pointer) {
    if (emulator::in_shared_memory(pointer, 1))
        emulator::fault("a load from global memory at %p, which is in shared memory", pointer);
    return *aligned<uint4>(pointer);
}
inline uint4 load_once(const void* pointer) { return load_global(pointer); }
inline uint4 load_coherent(const void* pointer) { return load_global(pointer); }
inline void store_4(void* pointer, u32 value) { *const_cast<u32*>(aligned<u32>(pointer)) = value; }
inline void store_8(void* pointer, uint2 value) { *const_cast<uint2*>(aligned<uint2>(pointer)) = value; }
inline void store_16(void* pointer, uint4 value) { *const_cast<uint4*>(aligned<uint4>(pointer)) = value; }

inline void copy_async_16(void* destination, const void* source, bool valid = true) {
    emulator::copy_async(destination, source, valid);
}
inline void copy_commit() { emulator::copy_commit(); }
template <int PENDING> inline void copy_wait() { emulator::copy_wait(PENDING); }

// ---- Barriers and warps ----

inline void __syncthreads(CALLER) { emulator::block_barrier(false, line); }
inline int __syncthreads_count(int predicate, CALLER) { return (int)emulator::block_barrier(predicate != 0, line); }
inline int __syncthreads_or(int predicate, CALLER) { return emulator::block_barrier(predicate != 0, line) != 0; }
inline int __syncthreads_and(int predicate, CALLER) { return emulator::block_barrier(predicate == 0, line) == 0; }

inline void __syncwarp(u32 mask = 0xffffffffu, CALLER) {
    emulator::warp_collective(mask, emulator::Collective::Sync, line, nullptr, 0);
}

// The value that lane `from` of `width` lanes of the caller's part of the warp brought; the caller's own where there is
// no such lane.
template <class T> inline T shuffle(u32 mask, T value, bool exists, u32 from, int line) {
    static_assert(sizeof(T) <= emulator::LANE_BYTES && std::is_trivially_copyable_v<T>);
    auto lanes = emulator::warp_collective(mask, emulator::Collective::Shuffle, line, &value, sizeof value);
    if (!exists) return value;
    if (!(mask >> from & 1)) emulator::fault("line %d: a shuffle reads lane %u, which its mask lacks", line, from);
    T other;
    std::memcpy(&other, lanes + from * emulator::LANE_BYTES, sizeof other);
    return other;
}

template <class T> inline T __shfl_sync(u32 mask, T value, int from, int width = 32, CALLER) {
    u32 lane = emulator::current->linear % 32, start = lane / width * width;
    return shuffle(mask, value, true, start + ((u32)from & (width - 1)), line);
}
template <class T> inline T __shfl_xor_sync(u32 mask, T value, int apart, int width = 32, CALLER) {
    u32 lane = emulator::current->linear % 32, from = lane ^ (u32)apart;
    return shuffle(mask, value, from / width <= lane / width, from, line);
}
template <class T> inline T __shfl_down_sync(u32 mask, T value, u32 apart, int width = 32, CALLER) {
    u32 lane = emulator::current->linear % 32;
    return shuffle(mask, value, lane % width + apart < (u32)width, lane + apart, line);
}
template <class T> inline T __shfl_up_sync(u32 mask, T value, u32 apart, int width = 32, CALLER) {
    u32 lane = emulator::current->linear % 32;
    return shuffle(mask, value, lane % width >= apart, lane - apart, line);
}

inline u32 __ballot_sync(u32 mask, int predicate, CALLER) {
    u32 bit = predicate != 0, votes = 0;
    auto lanes = emulator::warp_collective(mask, emulator::Collective::Vote, line, &bit, sizeof bit);
    for (u32 lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) votes |= (u32)lanes[lane * emulator::LANE_BYTES] << lane;
    return votes;
}
inline int __any_sync(u32 mask, int predicate, CALLER) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(u32 mask, int predicate, CALLER) { return __ballot_sync(mask, predicate, line) == mask; }

// ---- Matrices ----

inline void load_matrices(u32 (&out)[4], const void* row, emulator::Collective what, int line) {
    auto lanes = emulator::warp_collective(0xffffffffu, what, line, &row, sizeof row);
    std::memcpy(out, lanes + emulator::current->linear % 32 * emulator::LANE_BYTES, sizeof out);
}
inline void load_matrices(u32 (&out)[4], const void* row, CALLER) {
    load_matrices(out, row, emulator::Collective::LoadMatrices, line);
}
inline void load_matrices_transposed(u32 (&out)[4], const void* row, CALLER) {
    load_matrices(out, row, emulator::Collective::LoadMatricesTransposed, line);
}

inline void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], CALLER) {
    struct { float d[4]; u32 a[4], b[2]; } operands;
    std::memcpy(operands.d, d, sizeof d);
    std::memcpy(operands.a, a, sizeof a);
    std::memcpy(operands.b, b, sizeof b);
    auto lanes = emulator::warp_collective(0xffffffffu, emulator::Collective::MultiplyBf16, line, &operands,
                                           sizeof operands);
    std::memcpy(d, lanes + emulator::current->linear % 32 * emulator::LANE_BYTES, sizeof d);
}

// ---- Between blocks and devices ----

// Where accesses to memory are recorded (by whoever compiles kernels so), those through which threads tell each other
// something are told apart from the rest. Elsewhere nothing happens.
#ifdef CONSORT_RECORDED
#define UNRECORDED __attribute__((no_sanitize_address))
namespace emulator {
void atomic_access(const void* pointer, unsigned bytes);
void released(const void* flag);
void acquired(const void* flag);
} // namespace emulator
#else
#define UNRECORDED
namespace emulator {
inline void atomic_access(const void*, unsigned) {}
inline void released(const void*) {}
inline void acquired(const void*) {}
} // namespace emulator
#endif

UNRECORDED inline u32 load_acquire_system(const u32* pointer) {
    emulator::poll();
    u32 value = __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
    emulator::atomic_access(pointer, sizeof *pointer);
    emulator::acquired(pointer);
    return value;
}
UNRECORDED inline u32 load_relaxed_system(const u32* pointer) {
    emulator::poll();
    emulator::atomic_access(pointer, sizeof *pointer);
    return __atomic_load_n(pointer, __ATOMIC_RELAXED);
}
UNRECORDED inline void store_release_system(u32* pointer, u32 value) {
    emulator::progress();
    emulator::atomic_access(pointer, sizeof *pointer);
    emulator::released(pointer);
    __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}
UNRECORDED inline u32 fetch_add_device(u32* pointer, u32 value) {
    emulator::progress();
    emulator::atomic_access(pointer, sizeof *pointer);
    emulator::released(pointer);
    emulator::acquired(pointer);
    return __atomic_fetch_add(pointer, value, __ATOMIC_ACQ_REL);
}
inline void spin_pause() { emulator::poll(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T, class Change> UNRECORDED inline T atomically(T* pointer, Change change) {
    T before, after;
    emulator::atomic_access(pointer, sizeof *pointer);
    // Others run first: a thread may wait for them by this alone.
    emulator::poll();
    __atomic_load(pointer, &before, __ATOMIC_RELAXED);
    do after = change(before);
    while (!__atomic_compare_exchange(pointer, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    if (std::memcmp(&before, &after, sizeof before) != 0) emulator::progress();
    return before;
}

template <class T> inline T atomicAdd(T* pointer, T value) {
    return atomically(pointer, [=](T before) { return (T)(before + value); });
}
template <class T> inline T atomicMax(T* pointer, T value) {
    return atomically(pointer, [=](T before) { return before < value ? value : before; });
}
template <class T> inline T atomicMin(T* pointer, T value) {
    return atomically(pointer, [=](T before) { return value < before ? value : before; });
}
template <class T> inline T atomicOr(T* pointer, T value) {
    return atomically(pointer, [=](T before) { return before | value; });
}
template <class T> inline T atomicExch(T* pointer, T value) {
    return atomically(pointer, [=](T) { return value; });
}
template <class T> inline T atomicCAS(T* pointer, T expected, T value) {
    return atomically(pointer, [=](T before) { return before == expected ? value : before; });
}
