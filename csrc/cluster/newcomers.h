// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many trainers or workers that were not known before the holders of one key may bring: so many at once, and then
// so many a second. Each of them costs the controller a place, and all others a look at who works for whom; one that is
// turned away reports again in kPingInterval. Pure.

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

#include "base/instant.h"

namespace penstock::cluster {

constexpr double kNewcomersAtOnce = 1024;  // all ranks of a large job, or the workers that an engine starts together
constexpr double kNewcomersPerSecond = 16;

// Thread-compatible.
class Newcomers {
 public:
  // Whether one more may come whose key has this name. Names are few: those of the keys that are let in.
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

}  // namespace penstock::cluster
