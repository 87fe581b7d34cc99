// A multiplication as descriptors describe it, once nothing is left to object to.
#pragma once
#include "descriptors.h"

namespace lt {

// D = alpha * op(A) * op(B) + beta * C: D is m by n, the sums run over k.
struct Problem {
    Operation operation;
    Layout a, b, c, d;
    std::uint64_t m = 0, n = 0, k = 0;
    std::uint64_t batches = 1;
    bool a_transposed = false, b_transposed = false;
};

// Fills `problem`. INVALID_VALUE for descriptors that contradict each other, NOT_SUPPORTED for what the software
// library cannot do, be it that the real one cannot either or that nobody has needed it yet.
cublasStatus_t problem_of(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                          cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Problem& problem);

// Whether the library multiplies matrices of these types.
bool types_are_supported(std::uint32_t compute, std::uint32_t scale, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                         std::uint32_t d);

// Bytes of one element; zero for types that are not supported.
std::uint64_t element_bytes(std::uint32_t type);

bool has_bias(const Operation& operation);

} // namespace lt
