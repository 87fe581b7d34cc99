#include "report.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "devices.h"
#include "driver.h"
#include "host_memory.h"
#include "settings.h"

namespace software {

namespace {

struct Fault {
    int result = 0;
    bool hangs = false;
    // The process ends as if the system had killed it.
    bool dies = false;
    // The call does not return.
    bool stays = false;
};

// Never destroyed, since threads may call while the process ends.
struct Told {
    std::vector<std::string> violations, device_faults;
    std::set<std::string> said;
    std::uint64_t launches = 0, graph_launches = 0, graphs_behind = 0;
    std::map<std::string, std::uint64_t> calls;
    std::map<std::string, std::map<std::uint64_t, Fault>> faults;
};

[[noreturn]] void refuse_faults(const std::string& text) {
    std::fprintf(stderr,
                 "software driver: CONSORT_SOFTWARE_DRIVER_FAULTS has `%s`; it must be like `cuLaunchKernel:7=700`, "
                 "with a number, `hang`, `stay` or `die` at its end\n",
                 text.c_str());
    std::abort();
}

// `function:n=code`, with a number, `hang`, `stay` or `die` as the code.
void read_fault(const std::string& text, Told& told) {
    std::size_t colon = text.find(':'), equals = text.find('=');
    if (colon == std::string::npos || equals == std::string::npos || colon > equals) refuse_faults(text);
    char* end = nullptr;
    std::uint64_t call = std::strtoull(text.c_str() + colon + 1, &end, 10);
    if (end != text.c_str() + equals || call == 0) refuse_faults(text);
    Fault fault;
    std::string code = text.substr(equals + 1);
    fault.hangs = code == "hang";
    fault.dies = code == "die";
    fault.stays = code == "stay";
    if (!fault.hangs && !fault.dies && !fault.stays) {
        fault.result = static_cast<int>(std::strtol(code.c_str(), &end, 10));
        if (*end || fault.result <= 0) refuse_faults(text);
    }
    told.faults[text.substr(0, colon)][call] = fault;
}

Told& told() {
    static Told& all = *[] {
        auto* made = new Told;
        const std::string& text = settings().faults;
        for (std::size_t start = 0; start < text.size();) {
            std::size_t end = std::min(text.find(',', start), text.size());
            if (end > start) read_fault(text.substr(start, end - start), *made);
            start = end + 1;
        }
        return made;
    }();
    return all;
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        if (c == '\n')
            out += "\\n";
        else
            out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    return out + "\"";
}

std::string report_text() {
    std::string out = "{\"violations\":" + std::to_string(told().violations.size()) + ",\"messages\":[";
    for (const auto& message : told().violations) out += (out.back() == '[' ? "" : ",") + quoted(message);
    out += "],\"faults\":[";
    for (const auto& message : told().device_faults) out += (out.back() == '[' ? "" : ",") + quoted(message);
    out += "],\"devices\":[";
    for (const Device& device : devices())
        out += std::string(out.back() == '[' ? "" : ",") + "{\"bytes\":" + std::to_string(device.used) +
               ",\"bytes_max\":" + std::to_string(device.used_max) +
               ",\"left_in_contexts\":" + std::to_string(device.left) + "}";
    out += "],\"pinned_bytes\":" + std::to_string(pinned_bytes()) +
           ",\"pinned_left_in_contexts\":" + std::to_string(pinned_left()) +
           ",\"launches\":" + std::to_string(told().launches) +
           ",\"graph_launches\":" + std::to_string(told().graph_launches) +
           ",\"graphs_behind\":" + std::to_string(told().graphs_behind) + ",\"calls\":{";
    for (const auto& [name, count] : told().calls)
        out += (out.back() == '{' ? "" : ",") + quoted(name) + ":" + std::to_string(count);
    return out + "}}\n";
}

// Under the driver's lock, or when the process is ending in disorder anyway.
void write_report() {
    std::string path = settings().report;
    if (path.empty()) return;
    if (std::size_t at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
    // Whole or not at all: a process may be killed while it writes.
    std::string part = path + ".part", text = report_text();
    std::FILE* file = std::fopen(part.c_str(), "w");
    bool written = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file) written = std::fclose(file) == 0 && written;
    if (!written || std::rename(part.c_str(), path.c_str()) != 0)
        std::fprintf(stderr, "software driver: cannot write the report to %s\n", path.c_str());
}

} // namespace

void violation(const std::string& what) {
    if (!told().said.insert(what).second) return;
    told().violations.push_back(what);
    std::fprintf(stderr, "software driver: VIOLATION: %s\n", what.c_str());
    if (!settings().strict) return;
    write_report();
    std::abort();
}

void device_fault(const std::string& what, int result) {
    std::string message = what + " (result " + std::to_string(result) + ")";
    told().device_faults.push_back(message);
    std::fprintf(stderr, "software driver: %s\n", message.c_str());
}

void trace(const char* format, ...) {
    if (!settings().trace) return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "software driver: %s\n", text);
}

void count_launch() { told().launches++; }

void count_graph_launch(bool is_behind) {
    told().graph_launches++;
    told().graphs_behind += is_behind;
}

int count_call(const std::string& function, bool& hangs) {
    std::uint64_t call = ++told().calls[function];
    auto faults = told().faults.find(function);
    if (faults == told().faults.end()) return 0;
    auto fault = faults->second.find(call);
    if (fault == faults->second.end()) return 0;
    if (fault->second.dies) kill(getpid(), SIGKILL);
    hangs = fault->second.hangs;
    trace("%s: call %llu %s", function.c_str(), static_cast<unsigned long long>(call),
          fault->second.stays ? "stays"
          : hangs             ? "hangs"
                              : ("fails with " + std::to_string(fault->second.result)).c_str());
    return fault->second.stays ? STAYS : fault->second.result;
}

void stay() {
    for (;;) pause();
}

void report_at_exit() {
    std::atexit([] {
        Lock lock(driver().mutex);
        driver().ending = true;
        write_report();
    });
}

} // namespace software
