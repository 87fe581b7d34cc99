// Objects that callers hold by handle. A handle is a number that is never used twice, so that a null, destroyed or
// invented one is noticed instead of followed.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

template <class Handle, class Object> class Living {
public:
    Handle add(Object object) {
        std::lock_guard<std::mutex> lock(mutex);
        objects[++last] = std::make_shared<Object>(std::move(object));
        return reinterpret_cast<Handle>(last);
    }

    // Null for a handle that names nothing. What it names stays alive as long as the caller holds it.
    std::shared_ptr<Object> find(Handle handle) {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = objects.find(reinterpret_cast<std::uintptr_t>(handle));
        return found == objects.end() ? nullptr : found->second;
    }

    bool remove(Handle handle) {
        std::lock_guard<std::mutex> lock(mutex);
        return objects.erase(reinterpret_cast<std::uintptr_t>(handle)) == 1;
    }

private:
    std::mutex mutex;
    std::uintptr_t last = 0;
    std::unordered_map<std::uintptr_t, std::shared_ptr<Object>> objects;
};

// The one collection of a kind. Never destroyed: threads may still be in a library when the process ends.
template <class Handle, class Object> Living<Handle, Object>& living() {
    static auto* all = new Living<Handle, Object>;
    return *all;
}
