// driver KERNEL BLOCKS ORDER COPIES SEED [opened]: runs one planted kernel in one way, at once or bit by bit. Prints
// `clean`, `wrong: ...` or `fault: ...`; what a sanitizer finds it reports itself.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "launch.h"

extern "C" unsigned char* emulator_memory_take(std::size_t bytes);
extern "C" int emulator_memory_intact(const unsigned char* start, std::size_t bytes);

constexpr unsigned COUNT = 128;

// As emulator_launch, but bit by bit; what waits for memory to change is told after so many rounds.
static int run_opened(const EmulatorGrid& grid, const EmulatorSettings& settings, char* message, std::size_t bytes) {
    EmulatorOpenGrid* open = emulator_open(&grid, &settings, message, bytes);
    if (!open) return 1;
    int progress = EMULATOR_PROGRESSED;
    for (int blocked = 0; blocked < 100 && (progress == EMULATOR_PROGRESSED || progress == EMULATOR_BLOCKED);) {
        progress = emulator_advance(open, message, bytes);
        blocked = progress == EMULATOR_BLOCKED ? blocked + 1 : 0;
    }
    if (progress == EMULATOR_BLOCKED) std::snprintf(message, bytes, "%s is blocked", grid.kernel);
    if (progress == EMULATOR_MEMORY_FAULT && !emulator_touched(open)) std::abort();
    emulator_close(open);
    return progress != EMULATOR_DONE;
}

int main(int count, char** words) {
    bool opened = count == 7 && std::strcmp(words[6], "opened") == 0;
    if (count != 6 && !opened) return 2;
    unsigned blocks = (unsigned)std::atoi(words[2]);
    std::size_t out_bytes = COUNT * blocks * sizeof(float);
    auto* in = reinterpret_cast<float*>(emulator_memory_take(COUNT * sizeof(float)));
    auto* out = reinterpret_cast<float*>(emulator_memory_take(out_bytes));
    auto* flag = reinterpret_cast<std::uint32_t*>(emulator_memory_take(16));
    for (unsigned at = 0; at < COUNT; at++) in[at] = (float)at;
    std::memset(out, 0xff, out_bytes);
    std::memset(flag, 0, 16);
    void* arguments[] = {&in, &out, &flag};
    const std::uint32_t bytes[] = {8, 8, 8};
    EmulatorGrid grid{words[1], {blocks, 1, 1}, {COUNT, 1, 1}, 0, COUNT * sizeof(float), arguments, bytes, 3};
    EmulatorSettings settings{(std::uint32_t)std::atoi(words[3]), (std::uint32_t)std::atoi(words[4]),
                              (std::uint64_t)std::atoll(words[5]), blocks > 1};
    char message[1024];
    bool failed = opened ? run_opened(grid, settings, message, sizeof message) != 0
                         : emulator_launch(&grid, 1, &settings, message, sizeof message) != 0;
    if (failed) {
        std::printf("fault: %s\n", message);
        return 0;
    }
    for (unsigned at = 0; at < COUNT; at++)
        if (out[at] != (float)(COUNT - 1 - at)) {
            std::printf("wrong: element %u is %g\n", at, (double)out[at]);
            return 0;
        }
    std::puts("clean");
}
