// Our view of cuda.h as a text, one fact a line, for a test that holds it against another view.
#include "abi.h"
#include "abi_list.h"
#include "signature.h"

namespace {

std::string facts() {
    using namespace software;
    std::string text;
    auto add = [&](const std::string& what, const std::string& value) { text += what + " = " + value + "\n"; };
#define CONSTANT(name, theirs) add(#theirs, std::to_string(static_cast<long long>(name)));
#define TYPE(name, theirs) add("sizeof " #theirs, std::to_string(sizeof(name)));
#define FIELD(type, name, their_type, theirs) \
    add("offsetof " #their_type "." #theirs, std::to_string(offsetof(type, name)));
#define FUNCTION(name) add(#name, abi::Signature<decltype(name)>::text());
    DRIVER_ABI_CONSTANTS(CONSTANT)
    DRIVER_ABI_TYPES(TYPE)
    DRIVER_ABI_FIELDS(FIELD)
    DRIVER_ABI_FUNCTIONS(FUNCTION)
    return text;
}

} // namespace

extern "C" __attribute__((visibility("default"))) const char* software_driver_abi() {
    static const std::string text = facts();
    return text.c_str();
}
