// The multiplication: checked when it is called, executed when the device thread comes to it.
#include <cmath>
#include <cstring>
#include <memory>

#include "../enqueue.h"
#include "algorithms.h"
#include "extents.h"
#include "handle.h"
#include "numbers.h"
#include "refusal.h"
#include "sums.h"

namespace lt {

namespace {

struct Operands {
    std::uint64_t a, b, c, d, workspace;
    std::uint64_t workspace_bytes;
};

// Everything that an execution needs; the caller's descriptors may be gone by then.
struct Multiplication {
    Problem problem;
    Order order;
    Operands at;
    float alpha, beta;
};

template <class T = char> T* pointer(std::uint64_t address) { return reinterpret_cast<T*>(address); }

float load_number(std::uint64_t at, std::uint32_t type, std::uint64_t index) {
    if (type == CUDA_R_32F) return pointer<const float>(at)[index];
    std::uint16_t bits = pointer<const std::uint16_t>(at)[index];
    return type == CUDA_R_16BF ? float_of_bf16(bits) : float_of_half(bits);
}

void store_number(std::uint64_t at, std::uint32_t type, std::uint64_t index, float value) {
    if (type == CUDA_R_32F)
        pointer<float>(at)[index] = value;
    else
        pointer<std::uint16_t>(at)[index] = type == CUDA_R_16BF ? bf16_of_float(value) : half_of_float(value);
}

// One of the batch.
struct Item {
    const Multiplication& whole;
    std::uint64_t index;

    std::uint64_t address(std::uint64_t base, const Layout& layout) const {
        return base + index * static_cast<std::uint64_t>(layout.batch_stride) * element_bytes(layout.type);
    }

    View view(std::uint64_t base, const Layout& layout, bool transposed) const {
        bool tf32 = whole.problem.operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
        View view = {pointer(address(base, layout)), layout.type, tf32, 1, layout.ld};
        if (transposed) std::swap(view.row_step, view.column_step);
        return view;
    }
};

float activated(float value, std::uint32_t epilogue) {
    if (epilogue & CUBLASLT_EPILOGUE_RELU) return value > 0 ? value : 0;
    // The approximation by tanh: sqrt(2 / pi) and 0.044715.
    if (epilogue & CUBLASLT_EPILOGUE_GELU)
        return 0.5f * value * (1 + std::tanh(0.7978845608f * (value + 0.044715f * value * value * value)));
    return value;
}

// From a sum to the element of D: factor, C, bias, activation, rounding.
void finish(const Item& item, std::size_t row, std::size_t column, float sum) {
    const Problem& problem = item.whole.problem;
    float value = item.whole.alpha * sum;
    if (item.whole.beta != 0)
        value += item.whole.beta *
                 load_number(item.address(item.whole.at.c, problem.c), problem.c.type, column * problem.c.ld + row);
    if (has_bias(problem.operation))
        value += load_number(problem.operation.bias, problem.d.type,
                             item.index * static_cast<std::uint64_t>(problem.operation.bias_batch_stride) + row);
    store_number(item.address(item.whole.at.d, problem.d), problem.d.type, column * problem.d.ld + row,
                 activated(value, problem.operation.epilogue));
}

void for_each_sum(std::size_t row, std::size_t column, std::size_t rows, std::size_t columns, const Tile& tile,
                  auto use) {
    for (std::size_t y = 0; y < columns; y++)
        for (std::size_t x = 0; x < rows; x++) use(row + x, column + y, tile.sums[y][x]);
}

// Leaves the parts' sums in the workspace, as kernels that split k do, and adds them up last.
void execute_in_parts(const Item& item, const View& a, const View& b) {
    const Problem& problem = item.whole.problem;
    const Order& order = item.whole.order;
    std::size_t results = problem.m * problem.n;
    float* partial = pointer<float>(item.whole.at.workspace) + item.index * order.parts * results;
    for (std::uint64_t part = 0; part < order.parts; part++) {
        float* sums = partial + part * results;
        multiply(a, b, problem.m, problem.n, part_of(order, problem.k, part), order.chunk,
                 [&](std::size_t row, std::size_t column, std::size_t rows, std::size_t columns, const Tile& tile) {
                     for_each_sum(row, column, rows, columns, tile, [&](std::size_t x, std::size_t y, float sum) {
                         sums[y * problem.m + x] = sum;
                     });
                 });
    }
    for (std::size_t at = 0; at < results; at++) {
        float sum = 0;
        for (std::uint64_t part = 0; part < order.parts; part++) sum += partial[part * results + at];
        finish(item, at % problem.m, at / problem.m, sum);
    }
}

void execute(const Item& item) {
    const Multiplication& whole = item.whole;
    const Problem& problem = whole.problem;
    View a = item.view(whole.at.a, problem.a, problem.a_transposed);
    View b = item.view(whole.at.b, problem.b, problem.b_transposed);
    if (whole.order.parts > 1) return execute_in_parts(item, a, b);
    multiply(a, b, problem.m, problem.n, {0, problem.k}, whole.order.chunk,
             [&](std::size_t row, std::size_t column, std::size_t rows, std::size_t columns, const Tile& tile) {
                 for_each_sum(row, column, rows, columns, tile,
                              [&](std::size_t x, std::size_t y, float sum) { finish(item, x, y, sum); });
             });
}

// All in one go: it waits for nobody.
int poll(void* closure, std::uint64_t*) {
    const auto& whole = *static_cast<const Multiplication*>(closure);
    for (std::uint64_t index = 0; index < whole.problem.batches; index++) execute(Item{whole, index});
    return 1;
}

std::vector<SoftwareExtent> extents_of(const Multiplication& whole) {
    const Problem& problem = whole.problem;
    std::vector<SoftwareExtent> extents;
    add_extents(extents, whole.at.a, problem.a, false);
    add_extents(extents, whole.at.b, problem.b, false);
    if (whole.beta != 0) add_extents(extents, whole.at.c, problem.c, false);
    add_extents(extents, whole.at.d, problem.d, true);
    if (has_bias(problem.operation)) {
        std::uint64_t elements =
            (problem.batches - 1) * static_cast<std::uint64_t>(problem.operation.bias_batch_stride) + problem.m;
        extents.push_back({problem.operation.bias, elements * element_bytes(problem.d.type), 0});
    }
    if (whole.at.workspace_bytes) extents.push_back({whole.at.workspace, whole.at.workspace_bytes, 1});
    return extents;
}

cublasStatus_t enqueue(Multiplication multiplication, cudaStream_t stream) {
    std::vector<SoftwareExtent> extents = extents_of(multiplication);
    auto drop = [](void* closure) { delete static_cast<Multiplication*>(closure); };
    void* closure = new Multiplication(std::move(multiplication));
    SoftwareOperation operation = {"cublasLtMatmul", poll, closure, drop, extents.data(), extents.size()};
    int result = software_driver_enqueue(stream, &operation);
    if (result == 0) return CUBLAS_STATUS_SUCCESS;
    return refuse(CUBLAS_STATUS_EXECUTION_FAILED, "the driver answers %d", result);
}

// ---- Checks that need addresses ----

cublasStatus_t check_operands(const Problem& problem, const Operands& at, float beta) {
    if (!at.a || !at.b || !at.d || (beta != 0 && !at.c))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an operand is null");
    if (has_bias(problem.operation) && !problem.operation.bias)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the epilogue wants a bias, whose pointer is null");
    if (beta != 0 && at.c == at.d && problem.c != problem.d)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "D replaces C, but their layouts differ");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_alignment(const Algorithm& algorithm, const Problem& problem, const Operands& at, float beta) {
    // The bias, too: preferences do not speak of it, and there are kernels that fault on one that is not aligned.
    std::uint64_t bias = has_bias(problem.operation) ? problem.operation.bias : 0;
    const std::tuple<const char*, std::uint64_t, std::uint32_t> all[] = {{"A", at.a, problem.a.type},
                                                                         {"B", at.b, problem.b.type},
                                                                         {"C", beta != 0 ? at.c : 0, problem.c.type},
                                                                         {"D", at.d, problem.d.type},
                                                                         {"the bias", bias, problem.d.type}};
    for (auto [name, address, type] : all) {
        std::uint64_t alignment = alignment_of(algorithm, type);
        if (address % alignment != 0)
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s lies at %p; algorithm %d wants it aligned to %llu bytes",
                          name, pointer<void>(address), algorithm.id, static_cast<unsigned long long>(alignment));
    }
    return CUBLAS_STATUS_SUCCESS;
}

std::uint32_t alignment_at(std::uint64_t address) {
    return address == 0 ? 256 : static_cast<std::uint32_t>(std::min<std::uint64_t>(256, address & -address));
}

// The algorithm of a caller who names none: the best one without a workspace, as the default preferences have it.
cublasStatus_t choose_for(const Problem& problem, const Operands& at, Algorithm& algorithm) {
    Preference preference;
    preference.alignment_a = alignment_at(at.a);
    preference.alignment_b = alignment_at(at.b);
    preference.alignment_c = alignment_at(at.c);
    preference.alignment_d = alignment_at(at.d);
    std::vector<Choice> choices = choose(problem, preference, 1);
    if (choices.empty()) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm fits these operands");
    algorithm = choices[0].algorithm;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_workspace(const Requirements& requirements, const Operands& at) {
    if (requirements.workspace_bytes == 0) return CUBLAS_STATUS_SUCCESS;
    if (!at.workspace || at.workspace_bytes < requirements.workspace_bytes)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm needs a workspace of %llu bytes, not %llu at %p",
                      static_cast<unsigned long long>(requirements.workspace_bytes),
                      static_cast<unsigned long long>(at.workspace_bytes), pointer<void>(at.workspace));
    if (at.workspace % 16 != 0)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the workspace is not aligned to 16 bytes");
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

} // namespace lt

using namespace lt;

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t aLayout, const void* b,
                              cublasLtMatrixLayout_t bLayout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t cLayout, void* d, cublasLtMatrixLayout_t dLayout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t workspaceBytes,
                              cudaStream_t stream) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (cublasStatus_t status = check_handle(handle)) return status;
    if (!alpha || !beta) return refuse(CUBLAS_STATUS_INVALID_VALUE, "a factor is null");
    Multiplication whole = {};
    Problem& problem = whole.problem;
    if (cublasStatus_t status = problem_of(operation, aLayout, bLayout, cLayout, dLayout, problem)) return status;
    std::memcpy(&whole.alpha, alpha, sizeof whole.alpha);
    std::memcpy(&whole.beta, beta, sizeof whole.beta);
    auto address = [](const void* of) { return reinterpret_cast<std::uint64_t>(of); };
    whole.at = {address(a), address(b), address(c), address(d), address(workspace), workspaceBytes};
    if (cublasStatus_t status = check_operands(problem, whole.at, whole.beta)) return status;
    Algorithm chosen;
    if (algorithm)
        chosen = read(*algorithm);
    else if (cublasStatus_t status = choose_for(problem, whole.at, chosen))
        return status;
    Requirements requirements;
    if (cublasStatus_t status = check(chosen, problem, requirements)) return status;
    if (cublasStatus_t status = check_alignment(chosen, problem, whole.at, whole.beta)) return status;
    if (cublasStatus_t status = check_workspace(requirements, whole.at)) return status;
    // What lies behind the part that is needed stays untouched.
    whole.at.workspace_bytes = requirements.workspace_bytes;
    whole.order = order_of(chosen, problem.k);
    return enqueue(std::move(whole), stream);
}
