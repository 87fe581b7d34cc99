// Where the ranks of a communicator meet: memory that all their processes map, found by the unique id.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace nccl {

constexpr int RANKS_MAX = 16;

// What a rank hands over at a time. Longer operations take several turns.
constexpr std::size_t PART_BYTES = std::size_t(1) << 20;

// One rank's place. Turns are counted from 1, over all operations of the communicator.
struct Place {
    std::atomic<std::uint32_t> taken;
    std::atomic<std::int32_t> process;
    // The last turn for which the rank has put its part here, and what that turn is of.
    std::atomic<std::uint64_t> arrived, what;
    // The last turn of which the rank has read everybody's part.
    std::atomic<std::uint64_t> finished;
};

struct Shared {
    // As the first who came has it.
    std::atomic<std::uint32_t> ranks;
    std::atomic<std::uint32_t> joined;
    Place places[RANKS_MAX];
    alignas(4096) unsigned char parts[RANKS_MAX][PART_BYTES];
};

// A mapping of that memory, which goes with the last who needs it. Whatever is not zero in new memory would have to be
// made by one rank before the others; so everything begins with zeros.
class Segment {
public:
    // Null, with a reason, where the system refuses.
    static std::shared_ptr<Segment> open(const std::string& name, std::string& reason);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    Shared& operator*() const { return *shared; }
    Shared* operator->() const { return shared; }

    // Nobody finds it from now on; those who have it keep it.
    void forget_name();

private:
    Segment(std::string name, Shared* shared) : name(std::move(name)), shared(shared) {}

    std::string name;
    Shared* shared;
};

} // namespace nccl
