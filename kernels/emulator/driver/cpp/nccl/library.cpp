// libnccl.so.2: the functions. Communicators that do not block are slower than need be: what is asked of them happens
// when somebody has asked for news twice, as it may with the real library, whose threads do it in the back.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <utility>
#include <vector>

#include "../enqueue.h"
#include "../living.h"
#include "communicator.h"

extern "C" int cuCtxGetCurrent(void** context);

namespace nccl {

namespace {

using Lock = std::lock_guard<std::mutex>;

// Begins every name of a segment.
constexpr char PREFIX[] = "/consort-software-nccl-";

// Questions about a communicator that go by before what it has to do is done.
constexpr int PATIENCE = 2;

Living<ncclComm_t, std::shared_ptr<Communicator>>& communicators() {
    return living<ncclComm_t, std::shared_ptr<Communicator>>();
}

std::shared_ptr<Communicator> find(ncclComm_t handle) {
    auto found = communicators().find(handle);
    return found ? *found : nullptr;
}

// The last thing that went wrong on this thread, of whatever communicator.
thread_local std::string last_error;

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
    last_error = why;
    return result;
}

// Calls between ncclGroupStart and ncclGroupEnd, of this thread.
struct Group {
    int depth = 0;
    std::vector<std::pair<std::shared_ptr<Communicator>, std::function<ncclResult_t()>>> calls;
};

thread_local Group group;

ncclResult_t begin_call(const char* function) {
    int code = software_driver_count_call(function);
    if (code == 0) return ncclSuccess;
    return refuse(static_cast<ncclResult_t>(code),
                  std::string(function) + " fails because the environment asks for it");
}

// Now, or when somebody asks for news.
ncclResult_t issue(Communicator& communicator, std::function<ncclResult_t()> call) {
    Lock lock(communicator.mutex);
    if (communicator.blocking) return call();
    // The device may have failed meanwhile, and that stays.
    unsigned state = ncclSuccess;
    if (!communicator.state.compare_exchange_strong(state, ncclInProgress) && state != ncclInProgress)
        return static_cast<ncclResult_t>(state);
    communicator.later.push_back(std::move(call));
    communicator.patience = PATIENCE;
    return ncclInProgress;
}

ncclResult_t collective(Kind kind, const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                        ncclComm_t handle, cudaStream_t stream) {
    if (ncclResult_t result = begin_call(name_of(kind))) return result;
    std::shared_ptr<Communicator> communicator = find(handle);
    if (!communicator) return refuse(ncclInvalidArgument, "no communicator, or one that was destroyed or aborted");
    std::size_t element = element_bytes(type);
    bool gives = kind != Kind::Broadcast || root == communicator->rank;
    if (!element || root < 0 || root >= communicator->ranks || (count && ((gives && !from) || !to)))
        return refuse(ncclInvalidArgument, std::string(name_of(kind)) + ": a type, a root or a pointer is wrong");
    unsigned state = communicator->state;
    if (state == ncclInProgress && group.depth == 0)
        return refuse(ncclInvalidUsage, "the last thing asked of the communicator is still in progress");
    if (state != ncclSuccess && state != ncclInProgress) return static_cast<ncclResult_t>(state);
    if (count == 0) return ncclSuccess;
    Request request = {kind, reinterpret_cast<std::uint64_t>(from), reinterpret_cast<std::uint64_t>(to),
                       count * element, type, root};
    auto call = [communicator, request, stream] { return enqueue(communicator, request, stream); };
    if (group.depth == 0) return issue(*communicator, call);
    group.calls.emplace_back(communicator, call);
    return ncclSuccess;
}

// Takes this rank's place, if it is free and all agree on how many there are.
ncclResult_t join(Communicator& communicator) {
    Shared& shared = **communicator.segment;
    std::uint32_t ranks = 0;
    auto wanted = static_cast<std::uint32_t>(communicator.ranks);
    if (!shared.ranks.compare_exchange_strong(ranks, wanted) && ranks != wanted)
        return refuse(ncclInvalidArgument, "ranks do not agree on how many they are");
    if (shared.places[communicator.rank].taken.exchange(1))
        return refuse(ncclInvalidUsage, "rank " + std::to_string(communicator.rank) + " is there twice");
    shared.places[communicator.rank].process = getpid();
    if (!communicator.hangs) shared.joined++;
    return ncclSuccess;
}

// Under the communicator's lock.
void progress(Communicator& communicator) {
    if (communicator.joining) {
        if (communicator.hangs || communicator.late ||
            (*communicator.segment)->joined < static_cast<std::uint32_t>(communicator.ranks))
            return;
        communicator.joining = false;
        communicator.segment->forget_name();
        communicator.state = ncclSuccess;
        return;
    }
    if (communicator.state != ncclInProgress || --communicator.patience > 0) return;
    ncclResult_t worst = ncclSuccess;
    while (!communicator.later.empty()) {
        auto call = std::move(communicator.later.front());
        communicator.later.pop_front();
        if (ncclResult_t result = call()) worst = result;
    }
    // An operation may have failed on the device meanwhile.
    unsigned expected = ncclInProgress;
    communicator.state.compare_exchange_strong(expected, worst);
}

ncclResult_t wait_until_joined(Communicator& communicator) {
    for (;;) {
        {
            Lock lock(communicator.mutex);
            progress(communicator);
            if (!communicator.joining) return ncclSuccess;
        }
        usleep(200);
    }
}

// The environment may want this rank's joining to fail or never to end: `ncclCommInitRankConfig@1:1=hang`. Or the call
// itself: `ncclCommInitRankConfig@1:1=stay`. With the result "in progress" (7) only the others' come to an end.
ncclResult_t faults_of_joining(Communicator& communicator) {
    std::string key = "ncclCommInitRankConfig@" + std::to_string(communicator.rank);
    int hangs = 0;
    int code = software_driver_count_call_or_hang(key.c_str(), &hangs);
    communicator.hangs = hangs != 0;
    communicator.late = code == ncclInProgress;
    if (communicator.late) return ncclSuccess;
    return code ? refuse(static_cast<ncclResult_t>(code), key + " fails because the environment asks for it")
                : ncclSuccess;
}

ncclResult_t end(ncclComm_t handle, const std::shared_ptr<Communicator>& communicator) {
    Lock lock(communicator->mutex);
    communicator->aborted = true;
    communicator->later.clear();
    if (communicator->joining) communicator->segment->forget_name();
    communicators().remove(handle);
    return ncclSuccess;
}

} // namespace

// The caller holds the communicator's lock, or nobody else knows it.
ncclResult_t refuse(Communicator& communicator, ncclResult_t result, const std::string& why) {
    communicator.last_error = why;
    return refuse(result, why);
}

} // namespace nccl

using namespace nccl;

ncclResult_t ncclGetVersion(int* version) {
    if (!version) return ncclInvalidArgument;
    *version = 22703;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    if (!id) return refuse(ncclInvalidArgument, "nowhere to put the id");
    static std::atomic<unsigned> count{0};
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "%s%d-%u-%lld%09ld", PREFIX, getpid(), count++,
                  static_cast<long long>(now.tv_sec), now.tv_nsec);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    if (!comm) return refuse(ncclInvalidArgument, "nowhere to put the communicator");
    *comm = nullptr;
    id.internal[sizeof id.internal - 1] = 0;
    if (ranks < 1 || ranks > RANKS_MAX || rank < 0 || rank >= ranks)
        return refuse(ncclInvalidArgument, "a rank that is not there, or too many");
    if (std::strncmp(id.internal, PREFIX, sizeof PREFIX - 1) != 0)
        return refuse(ncclInvalidArgument, "an id that ncclGetUniqueId has not made");
    if (config && (config->magic != NCCL_API_MAGIC || config->size < sizeof *config))
        return refuse(ncclInvalidArgument, "a configuration that was not initialised");
    auto communicator = std::make_shared<Communicator>();
    communicator->rank = rank;
    communicator->ranks = ranks;
    communicator->blocking = !config || config->blocking != 0;
    if (software_driver_current_device() < 0)
        return refuse(ncclUnhandledCudaError, "the calling thread has no current context");
    cuCtxGetCurrent(&communicator->context);
    if (ncclResult_t result = faults_of_joining(*communicator)) return result;
    std::string reason;
    communicator->segment = Segment::open(id.internal, reason);
    if (!communicator->segment) return refuse(ncclSystemError, reason);
    if (ncclResult_t result = join(*communicator)) return result;
    *comm = communicators().add(communicator);
    return communicator->blocking ? wait_until_joined(*communicator) : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    std::shared_ptr<Communicator> communicator = find(comm);
    if (!communicator || !error) return refuse(ncclInvalidArgument, "no communicator, or nowhere to put the error");
    Lock lock(communicator->mutex);
    progress(*communicator);
    *error = static_cast<ncclResult_t>(communicator->state.load());
    return ncclSuccess;
}

// Operations under way end at the device thread's next look at them.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    std::shared_ptr<Communicator> communicator = find(comm);
    return communicator ? end(comm, communicator) : refuse(ncclInvalidArgument, "no communicator");
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    std::shared_ptr<Communicator> communicator = find(comm);
    if (!communicator) return refuse(ncclInvalidArgument, "no communicator");
    unsigned state = communicator->state;
    if (state != ncclSuccess) return refuse(ncclInvalidUsage, "the communicator is not at rest");
    return issue(*communicator, [] { return ncclSuccess; });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (ncclResult_t result = begin_call(__func__)) return result;
    std::shared_ptr<Communicator> communicator = find(comm);
    if (!communicator) return refuse(ncclInvalidArgument, "no communicator");
    if (communicator->state == ncclInProgress)
        return refuse(ncclInvalidUsage, "the communicator is not at rest");
    return end(comm, communicator);
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
    if (operation != ncclSum) return refuse(ncclInvalidArgument, "the software library only adds");
    return collective(Kind::AllReduce, from, to, count, type, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(Kind::AllGather, from, to, count, type, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective(Kind::Broadcast, from, to, count, type, root, comm, stream);
}

ncclResult_t ncclGroupStart() {
    if (ncclResult_t result = begin_call(__func__)) return result;
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (ncclResult_t result = begin_call(__func__)) return result;
    if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return ncclSuccess;
    ncclResult_t outcome = ncclSuccess;
    for (auto& [communicator, call] : std::exchange(group.calls, {})) {
        ncclResult_t result = issue(*communicator, std::move(call));
        if (outcome == ncclSuccess || (outcome == ncclInProgress && result != ncclSuccess)) outcome = result;
    }
    return outcome;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "operation in progress";
    }
    return "unknown result code";
}

// Of the calling thread; the text stays until its next call.
const char* ncclGetLastError(ncclComm_t comm) {
    std::shared_ptr<Communicator> communicator = find(comm);
    if (communicator) {
        Lock lock(communicator->mutex);
        if (!communicator->last_error.empty()) last_error = communicator->last_error;
    }
    return last_error.c_str();
}
