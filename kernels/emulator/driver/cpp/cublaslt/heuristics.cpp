// Which algorithms to propose, and in which order.
//
// Like the real library's, the first choice changes with the number of rows: few rows leave processors idle unless k is
// split among them. A caller that wants the same bits whatever else is in its batch must keep to one algorithm.
#include <algorithm>

#include "algorithms.h"
#include "handle.h"
#include "refusal.h"

namespace lt {

namespace {

// How to split k, and the length of chunks, for the smaller one of a result's two extents. Steps at which the choice
// changes stay distinct when k is too short to be split as often.
struct Step {
    std::uint64_t extent_max;
    std::int32_t splits;
    std::uint32_t option;
};
constexpr Step STEPS[] = {{8, 8, 1}, {32, 4, 0}, {128, 2, 1}, {~std::uint64_t(0), 1, 0}};

Algorithm tiled(const Problem& problem, std::int32_t splits, std::uint32_t option) {
    Algorithm algorithm = algorithm_for(problem, TILED);
    algorithm.tile = CUBLASLT_MATMUL_TILE_64x64;
    algorithm.stages = CUBLASLT_MATMUL_STAGES_64x3;
    algorithm.splits = splits;
    algorithm.reduction = splits > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    algorithm.option = option;
    return algorithm;
}

Algorithm simple(const Problem& problem, std::uint32_t option) {
    Algorithm algorithm = algorithm_for(problem, SIMPLE);
    algorithm.option = option;
    return algorithm;
}

// All that come into question, the presumably fastest first.
std::vector<Algorithm> proposals(const Problem& problem) {
    std::uint64_t extent = std::min(problem.m, problem.n);
    const Step* step = STEPS;
    while (extent > step->extent_max) step++;
    std::vector<Algorithm> all;
    for (std::int32_t splits = step->splits; splits >= 1; splits /= 2)
        all.push_back(tiled(problem, splits, step->option));
    all.push_back(tiled(problem, 1, 1 - step->option));
    all.push_back(simple(problem, 0));
    all.push_back(simple(problem, 1));
    return all;
}

bool is_allowed(const Algorithm& algorithm, const Requirements& requirements, const Problem& problem,
                const Preference& preference) {
    bool aligned = preference.alignment_a >= alignment_of(algorithm, problem.a.type) &&
                   preference.alignment_b >= alignment_of(algorithm, problem.b.type) &&
                   preference.alignment_c >= alignment_of(algorithm, problem.c.type) &&
                   preference.alignment_d >= alignment_of(algorithm, problem.d.type);
    bool reduction = algorithm.splits == 1 || (algorithm.reduction & preference.reductions);
    bool waves = preference.waves_max == 0 || requirements.waves <= preference.waves_max;
    bool implementation = !(implementation_of(algorithm) & ~preference.implementations);
    return aligned && reduction && waves && implementation &&
           requirements.workspace_bytes <= preference.workspace_bytes_max;
}

// Moves the first one with chunks of another length to the second place. Splits alone do not always change a result:
// with one chunk in each part the sums are the same.
void prefer_other_chunks(std::vector<Choice>& choices) {
    if (choices.empty()) return;
    std::uint32_t option = choices[0].algorithm.option;
    auto other = [option](const Choice& choice) { return choice.algorithm.option != option; };
    auto found = std::find_if(choices.begin(), choices.end(), other);
    if (found != choices.end()) std::rotate(choices.begin() + 1, found, found + 1);
}

} // namespace

std::vector<Choice> choose(const Problem& problem, const Preference& preference, std::size_t wanted) {
    // That some of its own proposals do not fit is no news to the caller.
    Quiet quiet;
    std::vector<Choice> choices;
    for (const Algorithm& algorithm : proposals(problem)) {
        Choice choice = {algorithm, {}};
        bool fits = check(algorithm, problem, choice.requirements) == CUBLAS_STATUS_SUCCESS;
        if (fits && is_allowed(algorithm, choice.requirements, problem, preference)) choices.push_back(choice);
    }
    prefer_other_chunks(choices);
    if (choices.size() > wanted) choices.resize(wanted);
    return choices;
}

} // namespace lt

using namespace lt;

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    if (cublasStatus_t status = begin_call(__func__)) return status;
    if (cublasStatus_t status = check_handle(handle)) return status;
    if (wanted <= 0 || !results || !found)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%d results wanted, or nowhere to put them", wanted);
    *found = 0;
    auto preferred = preference_of(preference);
    if (!preferred) return refuse(CUBLAS_STATUS_INVALID_VALUE, "the preference is null, or was destroyed");
    if (preferred->search_mode != CUBLASLT_SEARCH_BEST_FIT)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "search mode %u is not done", preferred->search_mode);
    Problem problem;
    if (cublasStatus_t status = problem_of(operation, a, b, c, d, problem)) return status;
    for (const Choice& choice : choose(problem, *preferred, static_cast<std::size_t>(wanted))) {
        cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
        result = {};
        result.algo = written(choice.algorithm);
        result.workspaceSize = choice.requirements.workspace_bytes;
        result.state = CUBLAS_STATUS_SUCCESS;
        result.wavesCount = choice.requirements.waves;
    }
    if (*found == 0)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm fits these operands within the preferences");
    return CUBLAS_STATUS_SUCCESS;
}
