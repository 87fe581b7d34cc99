// Products of matrices, summed in f32 in a stated order.
#pragma once
#include <functional>

#include "algorithms.h"

namespace lt {

// A matrix in memory by the steps, in elements, from row to row and from column to column.
struct View {
    const char* data;
    std::uint32_t type;
    // Whether its floats are read as tensor cores read them.
    bool tf32;
    std::int64_t row_step, column_step;
};

constexpr std::size_t TILE_ROWS = 16;
constexpr std::size_t TILE_COLUMNS = 4;

// Sums of a small piece of the result.
struct Tile {
    alignas(32) float sums[TILE_COLUMNS][TILE_ROWS];
};

// Receives a tile: of `rows` by `columns` sums, the first of which is the result's (row, column).
using Store = std::function<void(std::size_t row, std::size_t column, std::size_t rows, std::size_t columns,
                                 const Tile& tile)>;

// The products of A (m by k) and B (k by n) for `range` of k, added up in chunks of `chunk`.
void multiply(const View& a, const View& b, std::size_t m, std::size_t n, Range range, std::size_t chunk,
              const Store& store);

} // namespace lt
