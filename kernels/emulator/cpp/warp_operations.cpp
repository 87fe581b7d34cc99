#include "warp_operations.h"

#include <cstdint>
#include <cstring>
#include <utility>

namespace emulator {

const char* name_of(Collective what) {
    switch (what) {
    case Collective::Sync: return "__syncwarp";
    case Collective::Shuffle: return "a shuffle";
    case Collective::Vote: return "a vote";
    case Collective::LoadMatrices: return "load_matrices";
    case Collective::LoadMatricesTransposed: return "load_matrices_transposed";
    case Collective::MultiplyBf16: return "multiply_16x8x16";
    }
    return "a warp operation";
}

namespace {

void load_matrices(const Lanes& brought, int line, Lanes& result, bool transposed) {
    std::uint16_t rows[32][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const void* row;
        std::memcpy(&row, brought[lane], sizeof row);
        if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0)
            fault("line %d: lane %u gives the row of a matrix at %p, which is not aligned to 16 bytes", line,
                  lane, row);
        if (!in_shared_memory(row, 16))
            fault("line %d: lane %u gives the row of a matrix at %p, which is not in shared memory", line, lane, row);
        access_matrix_row(rows[lane], row);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        std::uint16_t out[4][2];
        for (unsigned matrix = 0; matrix < 4; matrix++)
            for (unsigned half = 0; half < 2; half++) {
                unsigned row = lane / 4, column = lane % 4 * 2 + half;
                if (transposed) std::swap(row, column);
                out[matrix][half] = rows[matrix * 8 + row][column];
            }
        std::memcpy(result[lane], out, sizeof out);
    }
}

struct Operands {
    float d[4];
    std::uint16_t a[4][2], b[2][2];
};

float widen(std::uint16_t bits) {
    std::uint32_t wide = std::uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Products are exact in float; they are summed in ascending k, from zero, then added to d. A tensor core sums them in
// another order and with other roundings: kernels may rely on neither.
void multiply(const Lanes& brought, Lanes& result) {
    float a[16][16], b[16][8], sums[16][8] = {};
    Operands operands[32];
    for (unsigned lane = 0; lane < 32; lane++) {
        std::memcpy(&operands[lane], brought[lane], sizeof(Operands));
        unsigned group = lane / 4, pair = lane % 4 * 2;
        for (unsigned part = 0; part < 4; part++)
            for (unsigned half = 0; half < 2; half++)
                a[group + part % 2 * 8][pair + part / 2 * 8 + half] = widen(operands[lane].a[part][half]);
        for (unsigned part = 0; part < 2; part++)
            for (unsigned half = 0; half < 2; half++)
                b[pair + part * 8 + half][group] = widen(operands[lane].b[part][half]);
    }
    for (unsigned row = 0; row < 16; row++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned column = 0; column < 8; column++) sums[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < 32; lane++) {
        float* d = operands[lane].d;
        for (unsigned at = 0; at < 4; at++) d[at] += sums[lane / 4 + at / 2 * 8][lane % 4 * 2 + at % 2];
        std::memcpy(result[lane], d, sizeof operands[lane].d);
    }
}

} // namespace

void complete_collective(Collective what, int line, const Lanes& brought, Lanes& result) {
    switch (what) {
    case Collective::LoadMatrices: return load_matrices(brought, line, result, false);
    case Collective::LoadMatricesTransposed: return load_matrices(brought, line, result, true);
    case Collective::MultiplyBf16: return multiply(brought, result);
    // Each lane reads what others brought.
    case Collective::Sync:
    case Collective::Shuffle:
    case Collective::Vote: std::memcpy(result, brought, sizeof brought);
    }
}

} // namespace emulator
