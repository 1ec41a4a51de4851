// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many unknown trainers or workers the holders of one key may register: a burst, and then a number per second. Each
// of them occupies one of the controller's places and causes a new assignment of all workers; a rejected one reports
// again after kPingInterval. Pure.

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

#include "base/instant.h"

namespace penstock::session {

constexpr double kNewcomersAtOnce = 1024;  // all ranks of a large job, or the workers that an engine starts together
constexpr double kNewcomersPerSecond = 16;

// Thread-compatible.
class Newcomers {
 public:
  // Whether one more process with a key of this name may register. There are few names: one per accepted key.
  bool take(const std::string& key_name, Instant now) {
    const auto [place, is_new] = budgets_.try_emplace(key_name, Budget{.left = kNewcomersAtOnce, .at = now});
    Budget& budget = place->second;
    const double earned = std::chrono::duration<double>(now - budget.at).count() * kNewcomersPerSecond;
    budget = {.left = std::min(kNewcomersAtOnce, budget.left + earned), .at = now};
    if (budget.left < 1) return false;
    --budget.left;
    return true;
  }

 private:
  struct Budget {
    double left;
    Instant at;
  };
  std::map<std::string, Budget> budgets_;
};

}  // namespace penstock::session
