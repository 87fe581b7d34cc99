// One fact of an interface a line, of whichever view of nccl.h was included before.
#pragma once
#include <string>

#include "../signature.h"
#include "abi_list.h"

// What the real header has as macros, whichever of its versions it is, is handed over.
inline std::string nccl_facts(long long id_bytes, long long magic) {
    std::string text;
    auto add = [&](const std::string& what, const std::string& value) { text += what + " = " + value + "\n"; };
    add("NCCL_UNIQUE_ID_BYTES", std::to_string(id_bytes));
    add("NCCL_CONFIG_INITIALIZER.magic", std::to_string(magic));
#define CONSTANT_FACT(name) add(#name, std::to_string(static_cast<long long>(name)));
#define TYPE_FACT(name) add("sizeof " #name, std::to_string(sizeof(name)));
#define FIELD_FACT(type, name) add("offsetof " #type "." #name, std::to_string(offsetof(type, name)));
#define FUNCTION_FACT(name) add(#name, abi::Signature<decltype(name)>::text());
    NCCL_ABI_CONSTANTS(CONSTANT_FACT)
    NCCL_ABI_TYPES(TYPE_FACT)
    NCCL_ABI_FIELDS(FIELD_FACT)
    NCCL_ABI_FUNCTIONS(FUNCTION_FACT)
    return text;
}
