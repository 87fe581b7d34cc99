// Our view of NVRTC against nvrtc.h.
#include <cstddef>
#include <cstdint>

#define SOFTWARE_LINKAGE
namespace ours {
#include "../cpp/nvrtc/abi.h"
}
#include "../cpp/nvrtc/abi_list.h"

#include <nvrtc.h>

#include "check.h"

NVRTC_ABI_CONSTANTS(CONSTANT)
NVRTC_ABI_TYPES(TYPE)
NVRTC_ABI_FIELDS(FIELD)
NVRTC_ABI_FUNCTIONS(FUNCTION)

int main() {
    return report("nvrtc.h", 0 NVRTC_ABI_CONSTANTS(ONE), 0 NVRTC_ABI_TYPES(ONE), 0 NVRTC_ABI_FIELDS(ONE),
                  0 NVRTC_ABI_FUNCTIONS(ONE));
}
