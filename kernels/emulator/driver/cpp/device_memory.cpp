// Device memory: taking it and giving it back.
#include <optional>

#include "api.h"
#include "capture.h"
#include "history.h"
#include "memory.h"

namespace software {

namespace {

// Gives memory back when everything before it in the stream is done.
class FreeWork : public Work {
public:
    explicit FreeWork(Allocation& allocation) : Work("cuMemFreeAsync"), allocation(allocation) {
        declared.writes.push_back(allocation.range);
    }

    std::unique_ptr<Execution> begin(Timed&) const override { return std::make_unique<Free>(allocation); }

private:
    struct Free : Execution {
        explicit Free(Allocation& allocation) : allocation(allocation) {}
        Outcome step() override {
            Lock lock(driver().mutex);
            release(allocation);
            return {Outcome::Done};
        }
        Allocation& allocation;
    };

    Allocation& allocation;
};

// Memory that is on its way back counts as free when nothing else is left.
Allocation* allocate_after_frees(Call& call, Context& context, std::size_t bytes) {
    if (Allocation* made = allocate(context, bytes)) return made;
    std::vector<std::shared_ptr<Completion>> frees;
    for (const auto& stream : streams())
        for (const auto& operation : stream->queue)
            if (dynamic_cast<const FreeWork*>(operation->work.get()) && stream->context->device == context.device)
                frees.push_back(operation->completion);
    for (const auto& free : frees)
        if (wait_for(call.lock, context, free)) return nullptr;
    return frees.empty() ? nullptr : allocate(context, bytes);
}

int take(Call& call, Context& context, Address* out, std::size_t bytes) {
    if (!out || !bytes) return INVALID_VALUE;
    Allocation* made = allocate_after_frees(call, context, bytes);
    if (context.sticky) return context.sticky;
    if (!made) {
        trace("%s: %zu bytes wanted, %zu of %zu free on device %d", call.name, bytes,
              context.device->memory_bytes - context.device->used, context.device->memory_bytes,
              context.device->ordinal);
        return OUT_OF_MEMORY;
    }
    *out = made->range.start;
    return SUCCESS;
}

} // namespace
} // namespace software

using namespace software;

API cuMemAlloc_v2(Address* out, std::size_t bytes) {
    return in_context(__func__, [&](Call& call, Context& context) -> int {
        if (int result = refuse_while_capturing()) return result;
        return take(call, context, out, bytes);
    });
}

API cuMemFree_v2(Address address) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        if (!address) return SUCCESS;
        if (int result = refuse_while_capturing()) return result;
        Allocation* allocation = find_start(address, Kind::Device);
        if (!allocation) return INVALID_VALUE;
        std::string user = in_flight(allocation->range);
        if (!user.empty())
            violation("cuMemFree of memory that is in use: " + describe(address) + ", by " + user +
                      ", whose end the host has not seen");
        release(*allocation);
        forget_history(allocation->range);
        return SUCCESS;
    });
}

API cuMemAllocAsync(Address* out, std::size_t bytes, void* handle) {
    return on_stream(__func__, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        if (stream->capture) {
            invalidate(*stream->capture);
            return CAPTURE_UNSUPPORTED;
        }
        return take(call, *stream->context, out, bytes);
    });
}

API cuMemFreeAsync(Address address, void* handle) {
    return on_stream(__func__, handle, [&](Call& call, const std::shared_ptr<Stream>& stream) -> int {
        if (stream->capture) {
            invalidate(*stream->capture);
            return CAPTURE_UNSUPPORTED;
        }
        if (!address) return SUCCESS;
        Allocation* allocation = find_start(address, Kind::Device);
        if (!allocation) return INVALID_VALUE;
        return enqueue(stream, std::make_shared<FreeWork>(*allocation), call.hangs);
    });
}

API cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    return in_context(__func__, [&](Call&, Context& context) -> int {
        if (!free || !total) return INVALID_VALUE;
        *free = context.device->memory_bytes - context.device->used;
        *total = context.device->memory_bytes;
        return SUCCESS;
    });
}

API cuMemGetAddressRange_v2(Address* base, std::size_t* bytes, Address address) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        const Allocation* found = find_memory(address);
        if (!found || !found->live) return NOT_FOUND;
        if (base) *base = found->range.start;
        if (bytes) *bytes = found->range.bytes();
        return SUCCESS;
    });
}

namespace {

enum PointerAttribute {
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    RANGE_START = 11,
    RANGE_SIZE = 12,
    MAPPED = 13,
};

// The value of an attribute; nothing where it has none or is unknown.
std::optional<std::uint64_t> attribute_of(const Allocation& memory, int attribute, Address address) {
    constexpr std::uint64_t TYPE_HOST = 1, TYPE_DEVICE = 2;
    switch (attribute) {
    case CONTEXT: return reinterpret_cast<std::uint64_t>(memory.context ? memory.context->handle : nullptr);
    case MEMORY_TYPE: return memory.of_host() ? TYPE_HOST : TYPE_DEVICE;
    case DEVICE_POINTER: return address;
    case HOST_POINTER: return memory.of_host() ? std::optional(address) : std::nullopt;
    case IS_MANAGED: return 0;
    case DEVICE_ORDINAL:
        return static_cast<std::uint64_t>(memory.device < 0 ? memory.context->device->ordinal : memory.device);
    case RANGE_START: return memory.range.start;
    case RANGE_SIZE: return memory.range.bytes();
    case MAPPED: return 1;
    default: return std::nullopt;
    }
}

} // namespace

API cuPointerGetAttribute(void* out, int attribute, Address address) {
    return in_context(__func__, [&](Call&, Context&) -> int {
        const Allocation* memory = find_memory(address);
        if (!out || !memory || !memory->live) return INVALID_VALUE;
        std::optional<std::uint64_t> value = attribute_of(*memory, attribute, address);
        if (!value) return INVALID_VALUE;
        bool wide = attribute == CONTEXT || attribute == DEVICE_POINTER || attribute == HOST_POINTER ||
                    attribute == RANGE_START || attribute == RANGE_SIZE;
        if (wide)
            *static_cast<std::uint64_t*>(out) = *value;
        else if (attribute == IS_MANAGED || attribute == MAPPED)
            *static_cast<unsigned char*>(out) = static_cast<unsigned char>(*value);
        else
            *static_cast<std::uint32_t*>(out) = static_cast<std::uint32_t>(*value);
        return SUCCESS;
    });
}
