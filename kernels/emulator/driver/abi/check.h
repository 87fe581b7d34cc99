// How our view of a C interface is held against the real header: by the compiler, name by name. `ours` is the namespace
// in which our header was included, before the real one, whose macros would change its names.
#pragma once
#include <cstdio>

#include "../cpp/signature.h"

#define CONSTANT(name) static_assert((long long)ours::name == (long long)::name, #name " has another value");
#define TYPE(name) static_assert(sizeof(ours::name) == sizeof(::name), #name " has another size");
#define FIELD(type, name)                                                                                   \
    static_assert(offsetof(ours::type, name) == offsetof(::type, name), #type "." #name " lies elsewhere"); \
    static_assert(sizeof(ours::type::name) == sizeof(::type::name), #type "." #name " has another size");
#define FUNCTION(name)                                                                  \
    static_assert(abi::Signature<decltype(ours::name)>::is_that_of<decltype(::name)>(), \
                  #name " takes or returns something else");

#define ONE(...) +1

// What the program says: that it was compiled is the result, so only what was compared is left to tell.
inline int report(const char* header, int constants, int types, int fields, int functions) {
    std::printf("%s: %d constants, %d sizes, %d fields and %d functions are as the software libraries have them\n",
                header, constants, types, fields, functions);
    return 0;
}
