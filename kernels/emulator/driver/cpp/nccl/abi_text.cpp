// Our view of nccl.h as a text, for a test that holds it against the real header's.
#include "abi.h"
#include "facts.h"

SOFTWARE_LINKAGE const char* software_nccl_abi() {
    static const std::string text = nccl_facts(NCCL_UNIQUE_ID_BYTES, NCCL_API_MAGIC);
    return text.c_str();
}
