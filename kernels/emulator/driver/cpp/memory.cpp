#include "memory.h"

#include <algorithm>
#include <map>
#include <memory>

#include "contexts.h"
#include "devices.h"
#include "host_memory.h"
#include "report.h"
#include "space.h"

namespace software {

namespace {

constexpr unsigned char SLACK = 0xa5;

// By where they end, so that the one that an address is in comes first after it.
std::map<Address, std::unique_ptr<Allocation>>& listed() {
    static auto& all = *new std::map<Address, std::unique_ptr<Allocation>>;
    return all;
}

std::uint64_t allocations = 0;

unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

Range pages_of(const Range& range) { return {range.start / PAGE * PAGE, round_up(range.end, PAGE)}; }

// Memory that ends, rounded up to ALIGNMENT, with a page; what was added is filled with a pattern.
Allocation* take(Kind kind, std::size_t bytes, int device, Context& context) {
    std::size_t body = round_up(std::max<std::size_t>(bytes, 1), ALIGNMENT), whole = round_up(body, PAGE);
    Address pages = take_addresses(whole, PAGE);
    if (!pages || !open_pages(range(pages, whole))) return nullptr;
    Address start = pages + whole - body;
    std::fill(bytes_at(start + bytes), bytes_at(start + body), SLACK);
    return list(kind, range(start, bytes), device, &context);
}

// Addresses of the host, and mapped ones, are used again: what was there before is of no interest any more.
void forget_dead(const Range& range) {
    auto next = listed().upper_bound(range.start);
    while (next != listed().end() && next->second->range.start < range.end)
        next = next->second->live ? std::next(next) : listed().erase(next);
}

void check_slack(const Allocation& allocation) {
    Address end = allocation.range.start + round_up(std::max<Address>(allocation.range.bytes(), 1), ALIGNMENT);
    for (Address at = allocation.range.end; at < end; at++)
        if (*bytes_at(at) != SLACK)
            return violation("something wrote " + std::to_string(at - allocation.range.end) +
                             " bytes beyond the end of " + describe(allocation.range.start));
}

} // namespace

Allocation* allocate(Context& context, std::size_t bytes) {
    Device& device = *context.device;
    std::size_t counted = round_up(bytes, ALIGNMENT);
    if (counted > device.memory_bytes - device.used) return nullptr;
    Allocation* made = take(Kind::Device, bytes, device.ordinal, context);
    if (made) device.use(counted);
    return made;
}

Allocation* allocate_pinned(Context& context, std::size_t bytes) {
    Allocation* made = take(Kind::Pinned, bytes, -1, context);
    if (made) count_pinned(static_cast<std::int64_t>(bytes));
    return made;
}

Allocation* list(Kind kind, const Range& range, int device, Context* context) {
    forget_dead(range);
    auto allocation = std::make_unique<Allocation>();
    allocation->range = range;
    allocation->kind = kind;
    allocation->device = device;
    allocation->context = context;
    allocation->number = ++allocations;
    auto& place = listed()[range.start + std::max<Address>(range.bytes(), 1)];
    place = std::move(allocation);
    return place.get();
}

void release(Allocation& allocation) {
    if (!allocation.live) return;
    allocation.live = false;
    // The program's own memory is its business again.
    if (allocation.kind == Kind::Registered) return forget_dead(allocation.range);
    bool ours = allocation.kind == Kind::Device || allocation.kind == Kind::Pinned;
    if (ours) {
        check_slack(allocation);
        Range body = range(allocation.range.start, round_up(std::max<Address>(allocation.range.bytes(), 1), ALIGNMENT));
        close_pages(pages_of(body));
    }
    if (allocation.kind == Kind::Device)
        devices()[allocation.device].give_back(round_up(allocation.range.bytes(), ALIGNMENT));
    if (allocation.kind == Kind::Pinned) count_pinned(-static_cast<std::int64_t>(allocation.range.bytes()));
}

void release_all_of(const Context& context) {
    for (auto& [end, allocation] : listed()) {
        bool goes_along = allocation->kind == Kind::Device || allocation->kind == Kind::Pinned;
        if (!allocation->live || allocation->context != &context || !goes_along) continue;
        // After a sticky error nothing can be freed any more, so nobody could have done better.
        if (allocation->kind == Kind::Device && !context.sticky)
            context.device->left += round_up(allocation->range.bytes(), ALIGNMENT);
        if (allocation->kind == Kind::Pinned && !context.sticky) count_pinned_left(allocation->range.bytes());
        release(*allocation);
    }
}

Allocation* find_memory(Address address) {
    auto found = listed().upper_bound(address);
    if (found == listed().end()) return nullptr;
    Allocation& allocation = *found->second;
    return address >= allocation.range.start ? &allocation : nullptr;
}

Allocation* find_start(Address address, Kind kind) {
    Allocation* found = find_memory(address);
    return found && found->live && found->kind == kind && found->range.start == address ? found : nullptr;
}

bool is_pinned(const Range& range) {
    const Allocation* found = find_memory(range.start);
    return found && found->live && found->of_host() && range.end <= found->range.end;
}

std::string describe(Address address) {
    char text[32];
    std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(address));
    const Allocation* found = find_memory(address);
    if (!found) {
        // Just beyond the end of one is worth telling.
        auto next = listed().upper_bound(address);
        if (next == listed().begin()) return std::string(text) + ", where no memory ever was";
        found = std::prev(next)->second.get();
    }
    std::string whose = found->device < 0 ? "of the host" : "of device " + std::to_string(found->device);
    return std::string(text) + ", byte " + std::to_string(address - found->range.start) + " of allocation " +
           std::to_string(found->number) + " (" + std::to_string(found->range.bytes()) + " bytes " + whose +
           (found->live ? ")" : ", freed)");
}

std::string why_not(const Range& range) {
    if (!range.bytes()) return "";
    const Allocation* found = find_memory(range.start);
    if (!found) {
        bool in_space = space().overlaps(range);
        return in_space ? "uses " + describe(range.start) : "";
    }
    if (!found->live) return "uses freed memory: " + describe(range.start);
    if (range.end <= found->range.end) return "";
    // Neighbouring mappings are one piece to the program.
    const Allocation* next = find_memory(found->range.end);
    bool goes_on = found->kind == Kind::Mapped && next && next->live && next->kind == Kind::Mapped;
    if (goes_on) return why_not({found->range.end, range.end});
    return "uses " + std::to_string(range.end - found->range.end) + " bytes beyond the end of memory: it begins at " +
           describe(range.start);
}

} // namespace software
