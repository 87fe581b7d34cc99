// Memory whose addresses and whose bytes are had separately, so that it can be shared with other processes: bytes are
// files without a name, which live as long as anybody holds them.
#include <map>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api.h"
#include "history.h"
#include "memory.h"
#include "settings.h"
#include "space.h"

namespace software {

namespace {

constexpr std::size_t GRANULARITY = 2 << 20;

// Memory up to this size is filled with ones; larger memory begins as zeros.
constexpr std::size_t POISONED_BYTES_MAX = 64 << 20;

// Bytes: held by handles and by mappings. They count against a device as long as they are held by the process that
// made them.
struct Physical {
    int file = -1;
    std::size_t bytes = 0;
    Device* device = nullptr;
    bool made_here = false;
    bool exportable = false;

    Physical() = default;
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;
    ~Physical() {
        if (file >= 0) close(file);
        if (made_here) device->give_back(bytes);
    }
};

struct Reserved {
    Range range;
    // What is mapped, by the address where it begins.
    std::map<Address, std::pair<std::shared_ptr<Physical>, Range>> mapped;
};

std::map<Address, Reserved>& reserved() {
    static auto& all = *new std::map<Address, Reserved>;
    return all;
}

Reserved* find_reserved(const Range& range) {
    auto next = reserved().upper_bound(range.start);
    if (next == reserved().begin()) return nullptr;
    Reserved& found = std::prev(next)->second;
    return range.end <= found.range.end ? &found : nullptr;
}

bool whole(std::size_t bytes) { return bytes && bytes % GRANULARITY == 0; }

Device* device_of(const MemoryLocation& location) {
    bool known = location.type == LOCATION_DEVICE && location.id >= 0 &&
                 location.id < static_cast<int>(devices().size());
    return known ? &devices()[location.id] : nullptr;
}

void poison(const Physical& physical) {
    if (physical.bytes > POISONED_BYTES_MAX) return;
    void* bytes = mmap(nullptr, physical.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, physical.file, 0);
    if (bytes == MAP_FAILED) return;
    std::fill_n(static_cast<unsigned char*>(bytes), physical.bytes, static_cast<unsigned char>(0xff));
    munmap(bytes, physical.bytes);
}

// Which device a file belongs to, for the process that imports it: in the name of the file.
std::string name_of(const Device& device) { return "consort-device-" + std::to_string(device.ordinal); }

Device* device_named(int file) {
    char name[256] = "";
    std::string link = "/proc/self/fd/" + std::to_string(file);
    ssize_t bytes = readlink(link.c_str(), name, sizeof name - 1);
    if (bytes <= 0) return nullptr;
    for (Device& device : devices())
        if (std::string(name, static_cast<std::size_t>(bytes)).find("/memfd:" + name_of(device) + " ") == 0)
            return &device;
    return nullptr;
}

// Ends mappings that lie in a range.
void unmap(Reserved& place, const Range& range) {
    for (auto at = place.mapped.begin(); at != place.mapped.end();) {
        const Range& mapping = at->second.second;
        if (mapping.start < range.start || mapping.end > range.end) {
            ++at;
            continue;
        }
        close_pages(mapping);
        if (Allocation* memory = find_memory(mapping.start)) release(*memory);
        at = place.mapped.erase(at);
    }
}

} // namespace
} // namespace software

using namespace software;

API cuMemGetAllocationGranularity(std::size_t* bytes, const MemoryProperties* properties, int) {
    return initialised(__func__, [&](Call&) -> int {
        if (!bytes || !properties || properties->type != MEMORY_PINNED) return INVALID_VALUE;
        if (!device_of(properties->location)) return INVALID_DEVICE;
        *bytes = GRANULARITY;
        return SUCCESS;
    });
}

API cuMemCreate(std::uint64_t* out, std::size_t bytes, const MemoryProperties* properties, unsigned long long flags) {
    return initialised(__func__, [&](Call&) -> int {
        if (!out || !properties || flags || !whole(bytes) || properties->type != MEMORY_PINNED) return INVALID_VALUE;
        if (properties->handle_types & ~HANDLE_POSIX_FILE) return NOT_SUPPORTED;
        if (properties->handle_types && !settings().shares) return NOT_SUPPORTED;
        Device* device = device_of(properties->location);
        if (!device) return INVALID_DEVICE;
        if (bytes > device->memory_bytes - device->used) return OUT_OF_MEMORY;
        auto physical = std::make_shared<Physical>();
        physical->file = memfd_create(name_of(*device).c_str(), MFD_CLOEXEC);
        if (physical->file < 0 || ftruncate(physical->file, static_cast<off_t>(bytes)) != 0) return OPERATING_SYSTEM;
        physical->bytes = bytes;
        physical->device = device;
        physical->made_here = true;
        physical->exportable = properties->handle_types & HANDLE_POSIX_FILE;
        device->use(bytes);
        poison(*physical);
        *out = reinterpret_cast<std::uint64_t>(handles<Physical>().add(physical));
        return SUCCESS;
    });
}

API cuMemRelease(std::uint64_t handle) { return destroyed<Physical>(__func__, reinterpret_cast<void*>(handle)); }

API cuMemRetainAllocationHandle(std::uint64_t* out, void* pointer) {
    return initialised(__func__, [&](Call&) -> int {
        auto address = reinterpret_cast<Address>(pointer);
        Reserved* place = find_reserved(range(address, 1));
        if (!out || !place) return INVALID_VALUE;
        for (const auto& [start, mapping] : place->mapped)
            if (mapping.second.holds(address)) {
                *out = reinterpret_cast<std::uint64_t>(handles<Physical>().add(mapping.first));
                return SUCCESS;
            }
        return INVALID_VALUE;
    });
}

API cuMemAddressReserve(Address* out, std::size_t bytes, std::size_t alignment, Address, unsigned long long flags) {
    return initialised(__func__, [&](Call&) -> int {
        bool power_of_two = (alignment & (alignment - 1)) == 0;
        if (!out || !whole(bytes) || flags || !power_of_two) return INVALID_VALUE;
        Address start = take_addresses(bytes, std::max(alignment, GRANULARITY));
        if (!start) return OUT_OF_MEMORY;
        reserved()[start].range = range(start, bytes);
        *out = start;
        return SUCCESS;
    });
}

API cuMemAddressFree(Address start, std::size_t bytes) {
    return initialised(__func__, [&](Call&) -> int {
        auto found = reserved().find(start);
        if (found == reserved().end() || found->second.range.bytes() != bytes) return INVALID_VALUE;
        if (!found->second.mapped.empty()) return INVALID_VALUE;
        reserved().erase(found);
        return SUCCESS;
    });
}

API cuMemMap(Address start, std::size_t bytes, std::size_t offset, std::uint64_t handle, unsigned long long flags) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Physical> physical = handles<Physical>().find(reinterpret_cast<void*>(handle));
        Range pages = range(start, bytes);
        Reserved* place = find_reserved(pages);
        // As the real one, it maps a handle as a whole only.
        if (!physical || !place || flags || offset || bytes != physical->bytes) return INVALID_VALUE;
        for (const auto& [other, mapping] : place->mapped)
            if (mapping.second.overlaps(pages)) return INVALID_VALUE;
        void* address = reinterpret_cast<void*>(start);
        if (mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED)
            return OPERATING_SYSTEM;
        place->mapped[start] = {physical, pages};
        list(Kind::Mapped, pages, physical->device->ordinal, nullptr);
        return SUCCESS;
    });
}

API cuMemUnmap(Address start, std::size_t bytes) {
    return initialised(__func__, [&](Call& call) -> int {
        Range pages = range(start, bytes);
        Reserved* place = find_reserved(pages);
        if (!place) return INVALID_VALUE;
        std::shared_ptr<Context> context = current_context();
        bool failed = context && context->sticky;
        // With a context that has failed its work has ended, and nobody can wait for that.
        if (failed) await_end_of_failed(call.lock, *context);
        std::string user = failed ? "" : in_flight(pages);
        if (!user.empty())
            violation("cuMemUnmap of memory that is in use: " + describe(start) + ", by " + user +
                      ", whose end the host has not seen");
        unmap(*place, pages);
        forget_history(pages);
        return SUCCESS;
    });
}

API cuMemSetAccess(Address start, std::size_t bytes, const MemoryAccess* wanted, std::size_t count) {
    return initialised(__func__, [&](Call&) -> int {
        Range pages = range(start, bytes);
        Reserved* place = find_reserved(pages);
        if (!place || !wanted) return INVALID_VALUE;
        for (auto& [address, mapping] : place->mapped) {
            if (!mapping.second.overlaps(pages)) continue;
            Allocation* memory = find_memory(address);
            for (std::size_t at = 0; at < count; at++) {
                Device* device = device_of(wanted[at].location);
                if (!device) return INVALID_DEVICE;
                if (wanted[at].flags == ACCESS_NONE)
                    memory->accessors.erase(device->ordinal);
                else
                    memory->accessors.insert(device->ordinal);
            }
            int protection = memory->accessors.empty() ? PROT_NONE : PROT_READ | PROT_WRITE;
            mprotect(reinterpret_cast<void*>(address), mapping.second.bytes(), protection);
        }
        return SUCCESS;
    });
}

API cuMemGetAccess(unsigned long long* flags, const MemoryLocation* location, Address address) {
    return initialised(__func__, [&](Call&) -> int {
        const Allocation* memory = find_memory(address);
        if (!flags || !location || !memory || memory->kind != Kind::Mapped) return INVALID_VALUE;
        *flags = memory->accessors.count(location->id) ? ACCESS_READ_WRITE : ACCESS_NONE;
        return SUCCESS;
    });
}

API cuMemExportToShareableHandle(void* out, std::uint64_t handle, int type, unsigned long long flags) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Physical> physical = handles<Physical>().find(reinterpret_cast<void*>(handle));
        if (!out || !physical || flags || type != HANDLE_POSIX_FILE || !physical->exportable) return INVALID_VALUE;
        int file = dup(physical->file);
        if (file < 0) return OPERATING_SYSTEM;
        *static_cast<int*>(out) = file;
        return SUCCESS;
    });
}

API cuMemImportFromShareableHandle(std::uint64_t* out, void* handle, int type) {
    return initialised(__func__, [&](Call&) -> int {
        if (!out || type != HANDLE_POSIX_FILE) return INVALID_VALUE;
        auto file = static_cast<int>(reinterpret_cast<std::intptr_t>(handle));
        struct stat about{};
        Device* device = device_named(file);
        if (!device || fstat(file, &about) != 0) return INVALID_VALUE;
        auto physical = std::make_shared<Physical>();
        physical->file = dup(file);
        if (physical->file < 0) return OPERATING_SYSTEM;
        physical->bytes = static_cast<std::size_t>(about.st_size);
        physical->device = device;
        *out = reinterpret_cast<std::uint64_t>(handles<Physical>().add(physical));
        return SUCCESS;
    });
}

API cuMemGetAllocationPropertiesFromHandle(MemoryProperties* out, std::uint64_t handle) {
    return initialised(__func__, [&](Call&) -> int {
        std::shared_ptr<Physical> physical = handles<Physical>().find(reinterpret_cast<void*>(handle));
        if (!out || !physical) return INVALID_VALUE;
        *out = {};
        out->type = MEMORY_PINNED;
        out->handle_types = physical->exportable ? std::uint32_t(HANDLE_POSIX_FILE) : 0;
        out->location = {LOCATION_DEVICE, physical->device->ordinal};
        return SUCCESS;
    });
}
