// What finished work has touched, for as long as unfinished or future work may conflict with it. Under the driver's
// lock.
#pragma once
#include <string>

#include "clock.h"
#include "ranges.h"

namespace software {

// Remembers what a piece of work has touched; what conflicts with it although nothing orders the two is a violation.
void remember(const std::string& name, const Moment& moment, Touches touches);

// The name of finished work that touched bytes and is not ordered before a clock; empty where there is none.
std::string unordered_toucher(const Range& range, const Clock& clock);

// What bytes were is of no interest any more: the memory is gone.
void forget_history(const Range& range);

} // namespace software
