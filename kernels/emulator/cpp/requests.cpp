// What threads ask the machine for: barriers, exchanges within a warp, copies.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace emulator {

namespace {

// Waits until `*word` is no longer `seen`.
void wait_for(const std::uint64_t* word, std::uint64_t seen, const char* in, int line) {
    Lane& lane = me();
    lane.waits_for = word;
    lane.seen = seen;
    lane.waits_in = in;
    lane.waits_line = line;
    while (*word == seen) lane.fiber.leave(false);
    lane.waits_for = nullptr;
}

Rendezvous& meeting_of(Warp& warp, unsigned mask) {
    for (auto& meeting : warp.meetings)
        if (meeting.mask == mask) return meeting;
    warp.meetings.emplace_back();
    warp.meetings.back().mask = mask;
    return warp.meetings.back();
}

void perform(const std::vector<Copy>& group) {
    for (const Copy& copy : group) access_copy_16(copy.to, copy.from, copy.valid);
}

} // namespace

void fault(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    Lane& lane = me();
    fail(describe(lane) + ": " + text);
    for (;;) lane.fiber.leave(true);
}

unsigned block_barrier(bool predicate, int line) {
    Lane& lane = me();
    Block& block = *lane.block;
    if (block.arrived == 0) {
        block.barrier_line = line;
        block.votes = 0;
    } else if (block.barrier_line != line) {
        fault("a divergent barrier: this thread reaches __syncthreads in line %d, others wait in line %d", line,
              block.barrier_line);
    }
    if (block.left_first)
        fault("line %d: __syncthreads, but a thread has left the kernel: %s", line,
              describe(*block.left_first).c_str());
    block.votes += predicate;
    block.arrived++;
    machine->events++;
    char* passed = &block.passed[block.generation % 2];
    publish(passed);
    if (block.arrived == block.alive) {
        block.arrived = 0;
        block.last_votes = block.votes;
        block.generation++;
    } else {
        wait_for(&block.generation, block.generation, "__syncthreads", line);
    }
    observe(passed);
    return block.last_votes;
}

const unsigned char* warp_collective(unsigned mask, Collective what, int line, const void* value, unsigned bytes) {
    Lane& lane = me();
    unsigned index = lane.place.linear % 32;
    Warp& warp = lane.block->warps[lane.place.linear / 32];
    if (!(mask >> index & 1))
        fault("line %d: %s whose mask 0x%08x lacks its own lane %u", line, name_of(what), mask, index);
    if (mask & ~warp.alive)
        fault("line %d: %s names lanes 0x%08x, which are absent or have left the kernel", line, name_of(what),
              mask & ~warp.alive);
    Rendezvous& meeting = meeting_of(warp, mask);
    if (meeting.arrived == 0) {
        meeting.what = what;
        meeting.line = line;
    } else if (meeting.what != what || meeting.line != line) {
        fault("a divergent warp: this thread reaches %s in line %d, others wait in %s in line %d", name_of(what), line,
              name_of(meeting.what), meeting.line);
    }
    if (bytes) std::memcpy(meeting.brought[index], value, bytes);
    meeting.arrived |= 1u << index;
    machine->events++;
    std::uint64_t generation = meeting.generation;
    if (what == Collective::Sync) publish(meeting.result[generation % 2]);
    if (meeting.arrived == mask) {
        complete_collective(what, line, meeting.brought, meeting.result[generation % 2]);
        meeting.arrived = 0;
        meeting.generation++;
    } else {
        wait_for(&meeting.generation, generation, name_of(what), line);
    }
    if (what == Collective::Sync) observe(meeting.result[generation % 2]);
    return meeting.result[generation % 2][0];
}

bool in_shared_memory(const void* pointer, std::size_t bytes) { return me().block->shared.holds(pointer, bytes); }

void poll() { me().fiber.leave(false); }

void progress() { machine->events++; }

void copy_async(void* destination, const void* source, bool valid) {
    auto misaligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0; };
    if (misaligned(destination) || (valid && misaligned(source)))
        fault("a copy of 16 bytes from %p to %p is not aligned", source, destination);
    Lane& lane = me();
    if (valid && lane.block->shared.holds(source, 1))
        fault("an asynchronous copy from %p, which is in shared memory: it must come from global memory", source);
    if (!lane.block->shared.holds(destination, 16))
        fault("an asynchronous copy to %p, which is not in the block's %zu bytes of shared memory", destination,
              lane.block->shared.bytes());
    unsigned copies = machine->settings.copies;
    if (copies == AT_ONCE || (copies == BY_CHANCE && machine->next_random() % 2))
        access_copy_16(destination, source, valid);
    else
        lane.copying->open.push_back({destination, source, valid});
}

void copy_commit() {
    Lane& lane = me();
    Copying& copying = *lane.copying;
    copying.groups.push_back(std::move(copying.open));
    copying.open.clear();
}

void copy_wait(unsigned pending) {
    Lane& lane = me();
    auto& groups = lane.copying->groups;
    while (groups.size() > pending) {
        perform(groups.front());
        groups.pop_front();
    }
}

} // namespace emulator
