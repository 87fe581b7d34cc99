// Which bytes an operand occupies: what the driver's clock watches.
#pragma once
#include <vector>

#include "../enqueue.h"
#include "descriptors.h"

namespace lt {

// Adds the extents of the matrix at `address`. Exact, so that what lies between its columns may be somebody else's;
// only of very many columns the gaps are counted in, too.
void add_extents(std::vector<SoftwareExtent>& extents, std::uint64_t address, const Layout& layout, bool writes);

} // namespace lt
