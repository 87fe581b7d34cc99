// Collective operations as work on a stream. A long one takes several turns, in each of which every rank puts a part of
// its elements into the segment, waits for the others' and takes what it needs.
//
// After an error, and after the loss of a peer, an operation waits until its communicator is aborted, as a kernel that
// waits for its peers does.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../cublaslt/numbers.h"
#include "../enqueue.h"
#include "communicator.h"

extern "C" int cuCtxGetCurrent(void** context);
extern "C" int cuCtxSetCurrent(void* context);

namespace nccl {

namespace {

// A whole number of elements of every type.
static_assert(PART_BYTES % 16 == 0);

struct Operation {
    std::shared_ptr<Communicator> communicator;
    Request request;
};

// Where an execution is, between two calls of `poll`.
struct Progress {
    std::uint64_t& begun;
    // Bytes that earlier turns have dealt with.
    std::uint64_t& offset;
    // The turn under way, and whether this rank has put its part there.
    std::uint64_t& turn;
    std::uint64_t& put;
};

unsigned char* memory(std::uint64_t address) { return reinterpret_cast<unsigned char*>(address); }

// Whether all ranks have come as far as `turn`.
bool all(const Communicator& communicator, std::atomic<std::uint64_t> Place::*count, std::uint64_t turn) {
    for (int rank = 0; rank < communicator.ranks; rank++)
        if (((*communicator.segment)->places[rank].*count).load(std::memory_order_acquire) < turn) return false;
    return true;
}

void fail(Communicator& communicator, ncclResult_t result, const std::string& why) {
    std::lock_guard<std::mutex> lock(communicator.mutex);
    communicator.state = refuse(communicator, result, why);
}

// Counts an execution, each replay of a graph being one; false where the environment wants it to fail or to hang.
bool may_begin(const Operation& operation) {
    Communicator& communicator = *operation.communicator;
    std::string name = name_of(operation.request.kind);
    std::string key = name + "@" + std::to_string(communicator.rank);
    int hangs = 0;
    int code = software_driver_count_call_or_hang(key.c_str(), &hangs);
    if (code) fail(communicator, static_cast<ncclResult_t>(code), name + " fails because the environment asks for it");
    return !code && !hangs;
}

// Whether a process has ended, waited for or not.
bool has_ended(std::int32_t process) {
    std::FILE* file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
    if (!file) return true;
    char state = 0;
    // The name in parentheses may hold anything but comes first.
    bool read = std::fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
    std::fclose(file);
    return read && (state == 'Z' || state == 'X');
}

// Tells of a peer whose process has ended, where the environment wants that noticed.
void look_after_peers(Communicator& communicator) {
    static const int code = [] {
        const char* text = std::getenv("CONSORT_SOFTWARE_DRIVER_NCCL_LOSS");
        char* end = nullptr;
        long result = text ? std::strtol(text, &end, 10) : 0;
        if (text && (*end || end == text)) {
            std::fprintf(stderr, "software driver: CONSORT_SOFTWARE_DRIVER_NCCL_LOSS is no number: `%s`\n", text);
            std::abort();
        }
        return static_cast<int>(result);
    }();
    if (!code) return;
    for (int rank = 0; rank < communicator.ranks; rank++)
        if (has_ended((*communicator.segment)->places[rank].process))
            fail(communicator, static_cast<ncclResult_t>(code),
                 "the connection to rank " + std::to_string(rank) + " is closed");
}

// What all ranks must agree on.
std::uint64_t signature(const Request& request) {
    return std::uint64_t(request.kind) << 60 ^ std::uint64_t(request.type) << 54 ^ std::uint64_t(request.root) << 48 ^
           request.bytes;
}

void put_part(const Operation& operation, std::uint64_t offset, std::size_t bytes, std::uint64_t turn) {
    const Communicator& communicator = *operation.communicator;
    const Request& request = operation.request;
    Shared& shared = **communicator.segment;
    Place& place = shared.places[communicator.rank];
    if (request.kind != Kind::Broadcast || request.root == communicator.rank)
        std::memcpy(shared.parts[communicator.rank], memory(request.from) + offset, bytes);
    place.what.store(signature(request), std::memory_order_relaxed);
    place.arrived.store(turn, std::memory_order_release);
}

// From the first rank to the last, rounded after each: whatever rank computes it, the bits are the same.
template <class Number, class Load, class Store>
void sum(const Shared& shared, int ranks, unsigned char* to, std::size_t bytes, Load load, Store store) {
    for (std::size_t at = 0; at < bytes; at += sizeof(Number)) {
        Number number;
        float total = 0;
        for (int rank = 0; rank < ranks; rank++) {
            std::memcpy(&number, shared.parts[rank] + at, sizeof number);
            total = rank == 0 ? load(number) : load(store(total)) + load(number);
        }
        number = store(total);
        std::memcpy(to + at, &number, sizeof number);
    }
}

void take_parts(const Operation& operation, std::uint64_t offset, std::size_t bytes) {
    const Communicator& communicator = *operation.communicator;
    const Request& request = operation.request;
    const Shared& shared = **communicator.segment;
    unsigned char* to = memory(request.to) + offset;
    switch (request.kind) {
    case Kind::AllReduce:
        if (request.type == ncclFloat32)
            sum<float>(shared, communicator.ranks, to, bytes, [](float x) { return x; }, [](float x) { return x; });
        else
            sum<std::uint16_t>(shared, communicator.ranks, to, bytes, lt::float_of_bf16, lt::bf16_of_float);
        return;
    case Kind::AllGather:
        for (int rank = 0; rank < communicator.ranks; rank++)
            std::memcpy(to + rank * request.bytes, shared.parts[rank], bytes);
        return;
    case Kind::Broadcast: std::memcpy(to, shared.parts[request.root], bytes); return;
    }
}

// The first rank that is doing something else in this turn, or -1.
int other_than(const Communicator& communicator, const Request& request) {
    for (int rank = 0; rank < communicator.ranks; rank++)
        if ((*communicator.segment)->places[rank].what.load(std::memory_order_relaxed) != signature(request))
            return rank;
    return -1;
}

// Goes on as far as the other ranks are; true when all is done.
bool go_on(const Operation& operation, const Progress& at) {
    Communicator& communicator = *operation.communicator;
    const Request& request = operation.request;
    Place& place = (*communicator.segment)->places[communicator.rank];
    while (at.offset < request.bytes) {
        std::size_t bytes = std::min<std::uint64_t>(PART_BYTES, request.bytes - at.offset);
        if (!at.put) {
            // Until everybody has read the last turn's parts they stay where they are.
            if (!all(communicator, &Place::finished, communicator.turn)) return false;
            at.turn = ++communicator.turn;
            put_part(operation, at.offset, bytes, at.turn);
            at.put = 1;
        }
        if (!all(communicator, &Place::arrived, at.turn)) return false;
        int other = other_than(communicator, request);
        if (other >= 0) {
            fail(communicator, ncclInvalidUsage,
                 "rank " + std::to_string(communicator.rank) + " is in " + name_of(request.kind) + " of " +
                     std::to_string(request.bytes) + " bytes, and rank " + std::to_string(other) +
                     " in another operation");
            return false;
        }
        take_parts(operation, at.offset, bytes);
        place.finished.store(at.turn, std::memory_order_release);
        at.offset += bytes;
        at.put = 0;
    }
    return true;
}

// The device thread's: nonzero when the execution has ended.
int poll(void* closure, std::uint64_t state[4]) {
    const auto& operation = *static_cast<const Operation*>(closure);
    Communicator& communicator = *operation.communicator;
    // What the destination holds then is anybody's guess.
    if (communicator.aborted) {
        communicator.running = nullptr;
        return 1;
    }
    unsigned now = communicator.state;
    if (now != ncclSuccess && now != ncclInProgress) return 0;
    // One at a time, whatever streams they are in.
    if (communicator.running && communicator.running != state) return 0;
    communicator.running = state;
    Progress at = {state[0], state[1], state[2], state[3]};
    constexpr std::uint64_t STOPPED = 2;
    if (at.begun == 0) at.begun = may_begin(operation) ? 1 : STOPPED;
    if (at.begun == STOPPED) return 0;
    if (!go_on(operation, at)) {
        look_after_peers(communicator);
        return 0;
    }
    communicator.running = nullptr;
    return 1;
}

void drop(void* closure) { delete static_cast<Operation*>(closure); }

} // namespace

const char* name_of(Kind kind) {
    switch (kind) {
    case Kind::AllReduce: return "ncclAllReduce";
    case Kind::AllGather: return "ncclAllGather";
    case Kind::Broadcast: return "ncclBroadcast";
    }
    return "no operation";
}

ncclResult_t enqueue(const std::shared_ptr<Communicator>& communicator, const Request& request, cudaStream_t stream) {
    bool gives = request.kind != Kind::Broadcast || request.root == communicator->rank;
    std::uint64_t taken = request.kind == Kind::AllGather ? request.bytes * communicator->ranks : request.bytes;
    SoftwareExtent extents[] = {{request.from, gives ? request.bytes : 0, 0}, {request.to, taken, 1}};
    SoftwareOperation operation = {
        name_of(request.kind), poll, new Operation{communicator, request}, drop, extents, 2};
    // Whoever asks for news may have another context current.
    void* before = nullptr;
    cuCtxGetCurrent(&before);
    cuCtxSetCurrent(communicator->context);
    int result = software_driver_enqueue(stream, &operation);
    cuCtxSetCurrent(before);
    if (result == 0) return ncclSuccess;
    return refuse(*communicator, ncclUnhandledCudaError,
                  std::string(name_of(request.kind)) + " was not enqueued: CUDA error " + std::to_string(result));
}

} // namespace nccl
