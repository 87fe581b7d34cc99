// Contexts: what belongs to one device and one user of it.
#pragma once
#include <memory>
#include <set>
#include <vector>

#include "abi.h"
#include "devices.h"

namespace software {

struct Stream;

struct Context {
    Device* device = nullptr;
    bool primary = false;
    // An error that ended all work; every later call returns it.
    int sticky = 0;
    bool destroyed = false;
    void* handle = nullptr;
    std::shared_ptr<Stream> null_stream;
    // Contexts of other devices whose memory kernels may touch, as long as both exist.
    std::set<const Context*> peers;
};

// The context of the calling thread; null where there is none.
std::shared_ptr<Context> current_context();

// Ends all work of a context. Under the driver's lock; what is being executed ends when the device thread comes to it.
void make_sticky(Context& context, int result);

} // namespace software
