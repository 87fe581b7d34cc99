#include "extents.h"

#include "problem.h"

namespace lt {

namespace {

constexpr std::uint64_t EXTENTS_MAX = 4096;

} // namespace

void add_extents(std::vector<SoftwareExtent>& extents, std::uint64_t address, const Layout& layout, bool writes) {
    std::uint64_t element = element_bytes(layout.type);
    std::uint64_t column = static_cast<std::uint64_t>(layout.ld) * element;
    std::uint64_t batch = static_cast<std::uint64_t>(layout.batch_stride) * element;
    std::uint64_t batches = batch == 0 ? 1 : static_cast<std::uint64_t>(layout.batch_count);
    std::uint64_t rows_bytes = layout.rows * element;
    std::uint64_t matrix = (layout.cols - 1) * column + rows_bytes;
    bool columns_touch = column == rows_bytes || layout.cols == 1;
    auto add = [&](std::uint64_t offset, std::uint64_t bytes) {
        extents.push_back({address + offset, bytes, writes ? 1u : 0u});
    };
    bool all_touch = columns_touch && (batches == 1 || batch == matrix);
    std::uint64_t pieces = batches * (columns_touch ? 1 : layout.cols);
    if (all_touch || pieces > EXTENTS_MAX) return add(0, (batches - 1) * batch + matrix);
    for (std::uint64_t i = 0; i < batches; i++) {
        if (columns_touch) {
            add(i * batch, matrix);
            continue;
        }
        for (std::uint64_t j = 0; j < layout.cols; j++) add(i * batch + j * column, rows_bytes);
    }
}

} // namespace lt
