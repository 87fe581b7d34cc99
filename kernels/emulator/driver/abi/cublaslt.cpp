// Our view of cuBLASLt against cublasLt.h.
#include <cstddef>
#include <cstdint>

#define SOFTWARE_LINKAGE
namespace ours {
#include "../cpp/cublaslt/abi.h"
}
#include "../cpp/cublaslt/abi_list.h"

#include <cublasLt.h>

#include "check.h"

CUBLASLT_ABI_CONSTANTS(CONSTANT)
CUBLASLT_ABI_TYPES(TYPE)
CUBLASLT_ABI_FIELDS(FIELD)
CUBLASLT_ABI_FUNCTIONS(FUNCTION)

int main() {
    return report("cublasLt.h", 0 CUBLASLT_ABI_CONSTANTS(ONE), 0 CUBLASLT_ABI_TYPES(ONE), 0 CUBLASLT_ABI_FIELDS(ONE),
                  0 CUBLASLT_ABI_FUNCTIONS(ONE));
}
