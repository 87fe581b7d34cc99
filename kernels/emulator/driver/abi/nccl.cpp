// Our view of NCCL against nccl.h; with the argument `facts`, what nccl.h says of the same names.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define SOFTWARE_LINKAGE
namespace ours {
#include "../cpp/nccl/abi.h"
}
#include "../cpp/nccl/abi_list.h"

#include <nccl.h>

#include "../cpp/nccl/facts.h"
#include "check.h"

NCCL_ABI_CONSTANTS(CONSTANT)
NCCL_ABI_TYPES(TYPE)
NCCL_ABI_FIELDS(FIELD)
NCCL_ABI_FUNCTIONS(FUNCTION)

constexpr ncclConfig_t INITIAL = NCCL_CONFIG_INITIALIZER;

int main(int count, char** arguments) {
    if (count > 1 && std::strcmp(arguments[1], "facts") == 0) {
        std::printf("%s", nccl_facts(NCCL_UNIQUE_ID_BYTES, INITIAL.magic).c_str());
        return 0;
    }
    return report("nccl.h", 0 NCCL_ABI_CONSTANTS(ONE), 0 NCCL_ABI_TYPES(ONE), 0 NCCL_ABI_FIELDS(ONE),
                  0 NCCL_ABI_FUNCTIONS(ONE));
}
