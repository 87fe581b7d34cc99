// How other libraries find functions: by name, and by tables that nobody outside of CUDA knows.
#include <cstring>
#include <dlfcn.h>
#include <string>

#include "abi.h"

using namespace software;

namespace {

void* own_library() {
    static void* library = [] {
        Dl_info info{};
        void* found = nullptr;
        if (dladdr(reinterpret_cast<void*>(&own_library), &info) && info.dli_fname)
            found = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
        return found;
    }();
    return library;
}

// A name stands for the newest version of a function, which is the one here.
void* find_function(const std::string& name) {
    if (name.compare(0, 2, "cu") != 0 || !own_library()) return nullptr;
    for (const char* version : {"_v4", "_v3", "_v2", ""})
        if (void* function = dlsym(own_library(), (name + version).c_str())) return function;
    return nullptr;
}

} // namespace

API cuGetProcAddress_v2(const char* name, void** out, int, std::uint64_t, int* status) {
    constexpr int FOUND = 0, UNKNOWN = 1;
    if (!name || !out) return INVALID_VALUE;
    *out = find_function(name);
    if (status) *status = *out ? FOUND : UNKNOWN;
    return *out ? SUCCESS : NOT_FOUND;
}

API cuGetProcAddress(const char* name, void** out, int version, std::uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

// A compiler that looks for its driver goes on without one when it finds no table.
API cuGetExportTable(const void** table, const void*) {
    if (table) *table = nullptr;
    return NOT_FOUND;
}
