// Our view of cublasLt.h as a text, one fact a line, for a test that holds it against another view.
#include "../signature.h"
#include "abi.h"
#include "abi_list.h"

namespace {

std::string facts() {
    std::string text;
    auto add = [&](const std::string& what, const std::string& value) { text += what + " = " + value + "\n"; };
#define CONSTANT(name) add(#name, std::to_string(static_cast<long long>(name)));
#define TYPE(name) add("sizeof " #name, std::to_string(sizeof(name)));
#define FIELD(type, name) add("offsetof " #type "." #name, std::to_string(offsetof(type, name)));
#define FUNCTION(name) add(#name, abi::Signature<decltype(name)>::text());
    CUBLASLT_ABI_CONSTANTS(CONSTANT)
    CUBLASLT_ABI_TYPES(TYPE)
    CUBLASLT_ABI_FIELDS(FIELD)
    CUBLASLT_ABI_FUNCTIONS(FUNCTION)
    return text;
}

} // namespace

SOFTWARE_LINKAGE const char* software_cublaslt_abi() {
    static const std::string text = facts();
    return text.c_str();
}
