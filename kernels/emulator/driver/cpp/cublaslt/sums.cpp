// Each sum is one lane's of a vector, so however wide vectors are, the order of additions stays as stated. Products and
// additions are rounded separately: this file is compiled without contraction.
#include "sums.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace lt {

namespace {

// Columns of B that are converted to floats once and used for all rows.
constexpr std::size_t BLOCK_COLUMNS = 64;

typedef float Lanes __attribute__((vector_size(32)));
constexpr std::size_t LANES = sizeof(Lanes) / sizeof(float);
constexpr std::size_t VECTORS = TILE_ROWS / LANES;

template <std::uint32_t TYPE> float load(const char* data, std::int64_t index) {
    if constexpr (TYPE == CUDA_R_32F) {
        float value;
        std::memcpy(&value, data + index * 4, 4);
        return value;
    } else {
        std::uint16_t bits;
        std::memcpy(&bits, data + index * 2, 2);
        return TYPE == CUDA_R_16BF ? float_of_bf16(bits) : float_of_half(bits);
    }
}

// Copies `count` lines of a matrix as floats, beside each other: element i of all lines, then i + 1 of all. Lines that
// are missing from `width` are zeros.
template <std::uint32_t TYPE>
void interleave(const View& view, std::int64_t line_step, std::int64_t step, std::size_t first, std::size_t count,
                std::size_t width, Range range, float* out) {
    std::size_t length = range.end - range.begin;
    for (std::size_t line = 0; line < width; line++) {
        std::int64_t from = static_cast<std::int64_t>(first + line) * line_step;
        for (std::size_t i = 0; i < length; i++) {
            std::int64_t at = from + static_cast<std::int64_t>(range.begin + i) * step;
            float value = line < count ? load<TYPE>(view.data, at) : 0.0f;
            out[i * width + line] = view.tf32 ? tf32_of_float(value) : value;
        }
    }
}

void interleave(const View& view, std::int64_t line_step, std::int64_t step, std::size_t first, std::size_t count,
                std::size_t width, Range range, float* out) {
    switch (view.type) {
    case CUDA_R_16BF: return interleave<CUDA_R_16BF>(view, line_step, step, first, count, width, range, out);
    case CUDA_R_16F: return interleave<CUDA_R_16F>(view, line_step, step, first, count, width, range, out);
    default: return interleave<CUDA_R_32F>(view, line_step, step, first, count, width, range, out);
    }
}

// Adds the sums over each chunk to `tile`.
[[gnu::always_inline]] inline void add_chunks(const float* a, const float* b, std::size_t length, std::size_t chunk,
                                              Tile& tile) {
    for (std::size_t begin = 0; begin < length; begin += chunk) {
        Lanes sums[TILE_COLUMNS][VECTORS] = {};
        std::size_t end = std::min(begin + chunk, length);
        for (std::size_t i = begin; i < end; i++) {
            Lanes rows[VECTORS];
            std::memcpy(rows, a + i * TILE_ROWS, sizeof rows);
            // Unrolled, so that the sums stay in registers.
#pragma GCC unroll 4
            for (std::size_t column = 0; column < TILE_COLUMNS; column++)
#pragma GCC unroll 2
                for (std::size_t vector = 0; vector < VECTORS; vector++)
                    sums[column][vector] += rows[vector] * b[i * TILE_COLUMNS + column];
        }
        for (std::size_t column = 0; column < TILE_COLUMNS; column++)
            for (std::size_t row = 0; row < TILE_ROWS; row++)
                tile.sums[column][row] += sums[column][row / LANES][row % LANES];
    }
}

void add_chunks_anywhere(const float* a, const float* b, std::size_t length, std::size_t chunk, Tile& tile) {
    add_chunks(a, b, length, chunk, tile);
}

#ifdef __x86_64__
// Without fused operations, so with the same results.
[[gnu::target("avx2")]] void add_chunks_avx2(const float* a, const float* b, std::size_t length, std::size_t chunk,
                                             Tile& tile) {
    add_chunks(a, b, length, chunk, tile);
}
#endif

auto fastest() {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) return add_chunks_avx2;
#endif
    return add_chunks_anywhere;
}

} // namespace

void multiply(const View& a, const View& b, std::size_t m, std::size_t n, Range range, std::size_t chunk,
              const Store& store) {
    static const auto sum = fastest();
    std::size_t length = range.end - range.begin;
    std::vector<float> columns(length * BLOCK_COLUMNS), rows(length * TILE_ROWS);
    for (std::size_t block = 0; block < n; block += BLOCK_COLUMNS) {
        std::size_t block_end = std::min(n, block + BLOCK_COLUMNS);
        for (std::size_t column = block; column < block_end; column += TILE_COLUMNS)
            interleave(b, b.column_step, b.row_step, column, std::min(TILE_COLUMNS, n - column), TILE_COLUMNS, range,
                       &columns[(column - block) * length]);
        for (std::size_t row = 0; row < m; row += TILE_ROWS) {
            std::size_t row_count = std::min(TILE_ROWS, m - row);
            interleave(a, a.row_step, a.column_step, row, row_count, TILE_ROWS, range, rows.data());
            for (std::size_t column = block; column < block_end; column += TILE_COLUMNS) {
                Tile tile = {};
                sum(rows.data(), &columns[(column - block) * length], length, chunk, tile);
                store(row, column, row_count, std::min(TILE_COLUMNS, n - column), tile);
            }
        }
    }
}

} // namespace lt
