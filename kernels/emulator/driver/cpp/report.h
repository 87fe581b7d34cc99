// What the driver tells: traces, violations, and one report when the process ends.
#pragma once
#include <cstdint>
#include <string>

namespace software {

// A mistake of the program that a real device might not notice. With STRICT it ends the process. Under the driver's
// lock.
void violation(const std::string& what);

// An error of a kernel or a copy, which the program is told by a result. Under the driver's lock.
void device_fault(const std::string& what, int result);

// Where CONSORT_SOFTWARE_DRIVER_TRACE asks for it, a line on stderr.
__attribute__((format(printf, 1, 2))) void trace(const char* format, ...);

// ---- What is counted. Under the driver's lock. ----

void count_launch();
// Whether it was put behind its last launch, which had not ended.
void count_graph_launch(bool is_behind);

// Counts a call. Returns 0, or the code with which CONSORT_SOFTWARE_DRIVER_FAULTS wants it to fail; `hangs` is set
// where the work that it enqueues shall never end. STAYS where the call itself shall not: whoever asked is to give up
// the lock, and `stay`.
constexpr int STAYS = -1;
int count_call(const std::string& function, bool& hangs);

// Never returns.
[[noreturn]] void stay();

// From the first cuInit on: the report is written when the process ends.
void report_at_exit();

} // namespace software
