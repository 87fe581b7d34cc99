// Objects that the program holds by handle. A handle is a number that is never used twice, so one that is null,
// destroyed or invented is noticed instead of followed. Under the driver's lock.
#pragma once
#include <cstdint>
#include <map>
#include <memory>

namespace software {

template <class Object> class Handles {
public:
    void* add(std::shared_ptr<Object> object) {
        objects[++last] = std::move(object);
        return reinterpret_cast<void*>(last);
    }

    // Null for a handle that names nothing.
    std::shared_ptr<Object> find(const void* handle) const {
        auto found = objects.find(reinterpret_cast<std::uintptr_t>(handle));
        return found == objects.end() ? nullptr : found->second;
    }

    // What the handle named, if anything.
    std::shared_ptr<Object> remove(const void* handle) {
        auto found = objects.find(reinterpret_cast<std::uintptr_t>(handle));
        if (found == objects.end()) return nullptr;
        std::shared_ptr<Object> object = std::move(found->second);
        objects.erase(found);
        return object;
    }

    const std::map<std::uintptr_t, std::shared_ptr<Object>>& all() const { return objects; }

private:
    // Small numbers mean the default streams.
    std::uintptr_t last = 0x1000;
    std::map<std::uintptr_t, std::shared_ptr<Object>> objects;
};

// The one collection of a kind. Never destroyed: threads may still be in the library when the process ends.
template <class Object> Handles<Object>& handles() {
    static auto& all = *new Handles<Object>;
    return all;
}

} // namespace software
