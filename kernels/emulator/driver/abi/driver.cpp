// Our view of the driver against cuda.h.
#include <cstddef>
#include <cstdint>

#define API int
namespace ours {
#include "../cpp/abi.h"
using namespace software;
}
#include "../cpp/abi_list.h"

#include <cuda.h>

#include "check.h"

#undef CONSTANT
#undef TYPE
#undef FIELD
#define CONSTANT(name, theirs) static_assert((long long)ours::name == (long long)::theirs, #theirs " is not " #name);
#define TYPE(name, theirs) static_assert(sizeof(ours::name) == sizeof(::theirs), #theirs " has not the size of " #name);
#define FIELD(type, name, their_type, theirs)                                     \
    static_assert(offsetof(ours::type, name) == offsetof(::their_type, theirs), \
                  #their_type "." #theirs " is not where " #type "." #name " is");

DRIVER_ABI_CONSTANTS(CONSTANT)
DRIVER_ABI_TYPES(TYPE)
DRIVER_ABI_FIELDS(FIELD)
DRIVER_ABI_FUNCTIONS(FUNCTION)

int main() {
    return report("cuda.h", 0 DRIVER_ABI_CONSTANTS(ONE), 0 DRIVER_ABI_TYPES(ONE), 0 DRIVER_ABI_FIELDS(ONE),
                  0 DRIVER_ABI_FUNCTIONS(ONE));
}
