// The driver's one lock. API calls take it and leave work in streams; the device thread takes work from there and
// holds the lock only between the steps of executing it.
#pragma once
#include <condition_variable>
#include <mutex>

namespace software {

using Lock = std::unique_lock<std::mutex>;

struct Driver {
    std::mutex mutex;
    // For the device thread: there may be something to do.
    std::condition_variable work;
    // For callers: something has been done.
    std::condition_variable done;
    bool initialised = false;
    // The process is on its way out: nothing is begun any more.
    bool ending = false;
};

Driver& driver();

} // namespace software
