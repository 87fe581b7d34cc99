// Pinned memory of the host, which devices read and write while the host goes on.
#include "host_memory.h"

#include "api.h"
#include "capture.h"
#include "history.h"
#include "memory.h"

namespace software {

namespace {

std::int64_t pinned = 0;
std::uint64_t left = 0;

int take_pinned(const char* name, void** out, std::size_t bytes) {
    return in_context(name, [&](Call&, Context& context) -> int {
        if (!out || !bytes) return INVALID_VALUE;
        if (int result = refuse_while_capturing()) return result;
        const Allocation* made = allocate_pinned(context, bytes);
        if (!made) return OUT_OF_MEMORY;
        *out = reinterpret_cast<void*>(made->range.start);
        return SUCCESS;
    });
}

int give_back(const char* name, void* pointer, Kind kind, int otherwise) {
    return in_context(name, [&](Call& call, Context&) -> int {
        if (int result = refuse_while_capturing()) return result;
        Allocation* memory = find_start(reinterpret_cast<Address>(pointer), kind);
        if (!memory) return otherwise;
        Range range = memory->range;
        std::string user = in_flight(range);
        if (!user.empty())
            violation(std::string(call.name) + " of memory that is in use: " + describe(range.start) + ", by " + user +
                      ", whose end the host has not seen");
        release(*memory);
        forget_history(range);
        return SUCCESS;
    });
}

} // namespace

std::uint64_t pinned_bytes() { return static_cast<std::uint64_t>(pinned); }
std::uint64_t pinned_left() { return left; }
void count_pinned(std::int64_t bytes) { pinned += bytes; }
void count_pinned_left(std::uint64_t bytes) { left += bytes; }

} // namespace software

using namespace software;

// The flags tell who sees the memory and how it is cached: here everybody does.
API cuMemHostAlloc(void** out, std::size_t bytes, unsigned) { return take_pinned(__func__, out, bytes); }
API cuMemAllocHost_v2(void** out, std::size_t bytes) { return take_pinned(__func__, out, bytes); }
API cuMemFreeHost(void* pointer) { return give_back(__func__, pointer, Kind::Pinned, INVALID_VALUE); }

API cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned) {
    return in_context(__func__, [&](Call&, Context& context) -> int {
        if (!pointer || !bytes) return INVALID_VALUE;
        if (int result = refuse_while_capturing()) return result;
        Range asked = range(reinterpret_cast<Address>(pointer), bytes);
        const Allocation* before = find_memory(asked.start);
        if (before && before->live) return HOST_MEMORY_ALREADY_REGISTERED;
        list(Kind::Registered, asked, -1, &context);
        return SUCCESS;
    });
}

API cuMemHostUnregister(void* pointer) {
    return give_back(__func__, pointer, Kind::Registered, HOST_MEMORY_NOT_REGISTERED);
}

API cuMemHostGetDevicePointer_v2(Address* out, void* pointer, unsigned flags) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        const Allocation* memory = find_memory(reinterpret_cast<Address>(pointer));
        if (!out || flags || !memory || !memory->live || !memory->of_host()) return INVALID_VALUE;
        *out = reinterpret_cast<Address>(pointer);
        return SUCCESS;
    });
}

API cuMemHostGetFlags(unsigned* flags, void* pointer) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        const Allocation* memory = find_memory(reinterpret_cast<Address>(pointer));
        if (!flags || !memory || !memory->live || !memory->of_host()) return INVALID_VALUE;
        *flags = HOST_PORTABLE | HOST_DEVICE_MAP;
        return SUCCESS;
    });
}
