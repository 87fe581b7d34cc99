// One rank's communicator, and the collective operations that go through it.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "abi.h"
#include "segment.h"

namespace nccl {

enum class Kind : std::uint8_t { AllReduce = 1, AllGather, Broadcast };

const char* name_of(Kind kind);

struct Communicator {
    int rank = 0, ranks = 0;
    bool blocking = true;
    // The context that was current when it was made: its operations are enqueued there.
    void* context = nullptr;
    std::shared_ptr<Segment> segment;

    // Guards what is below, up to the next comment.
    std::mutex mutex;
    bool joining = true;
    // The environment wants it never to be complete, and the others neither, or only itself.
    bool hangs = false, late = false;
    // What was called and is enqueued when somebody asks for news, as the real library's threads do it in the back.
    std::deque<std::function<ncclResult_t()>> later;
    // Questions that are answered with "in progress" before the next thing is done.
    int patience = 0;
    std::string last_error;

    // Read by the device thread, too.
    std::atomic<unsigned> state{ncclInProgress};
    std::atomic<bool> aborted{false};

    // Of the device thread alone: turns so far, and the execution that is under way.
    std::uint64_t turn = 0;
    const void* running = nullptr;
};

// What an operation is asked to do.
struct Request {
    Kind kind;
    std::uint64_t from, to;
    // Of each rank's part.
    std::uint64_t bytes;
    ncclDataType_t type;
    int root;
};

// Enqueues an operation; the communicator lives as long as the stream, or a graph, may still execute it.
ncclResult_t enqueue(const std::shared_ptr<Communicator>& communicator, const Request& request, cudaStream_t stream);

// Records why, and returns the result.
ncclResult_t refuse(Communicator& communicator, ncclResult_t result, const std::string& why);

inline std::size_t element_bytes(ncclDataType_t type) {
    return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 0;
}

} // namespace nccl
