#include "settings.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace software {

namespace {

[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
    std::fprintf(stderr, "software driver: CONSORT_SOFTWARE_DRIVER_%s is `%s`; it must be %s\n", name, value.c_str(),
                 expected);
    std::abort();
}

std::string text(const char* name) {
    const char* value = std::getenv(("CONSORT_SOFTWARE_DRIVER_" + std::string(name)).c_str());
    return value ? value : "";
}

std::uint64_t number(const char* name, std::uint64_t otherwise, std::uint64_t least, std::uint64_t most) {
    std::string value = text(name);
    if (value.empty()) return otherwise;
    char* end = nullptr;
    errno = 0;
    std::uint64_t parsed = std::strtoull(value.c_str(), &end, 10);
    if (errno || *end || value[0] == '-' || parsed < least || parsed > most)
        refuse(name, value, ("a number from " + std::to_string(least) + " to " + std::to_string(most)).c_str());
    return parsed;
}

void read_order(Settings& into) {
    std::string value = text("ORDER");
    if (value.empty() || value == "lazy") return;
    const std::string random = "random:";
    if (value == "eager") {
        into.order = Order::Eager;
    } else if (value.rfind(random, 0) == 0) {
        into.order = Order::Random;
        char* end = nullptr;
        into.seed = std::strtoull(value.c_str() + random.size(), &end, 10);
        if (*end || value.size() == random.size()) refuse("ORDER", value, "`random:` and a number");
    } else {
        refuse("ORDER", value, "`lazy`, `eager` or `random:SEED`");
    }
}

Settings read() {
    Settings all;
    all.devices = static_cast<int>(number("DEVICES", 1, 0, 64));
    all.memory_bytes = number("MEMORY", all.memory_bytes, 1, std::uint64_t(1) << 40);
    all.lag_ms = static_cast<int>(number("LAG_MS", 20, 0, 3'600'000));
    all.graph_ms = static_cast<int>(number("GRAPH_MS", 0, 0, 60'000));
    all.capability = static_cast<int>(number("CAPABILITY", 90, 80, 129));
    all.peers = number("PEERS", 1, 0, 1) != 0;
    all.faults = text("FAULTS");
    all.trace = number("TRACE", 0, 0, 1) != 0;
    all.strict = number("STRICT", 1, 0, 1) != 0;
    all.report = text("REPORT");
    all.shares = number("SHARES", 1, 0, 1) != 0;
    read_order(all);
    return all;
}

} // namespace

const Settings& settings() {
    static const Settings& all = *new Settings(read());
    return all;
}

} // namespace software
