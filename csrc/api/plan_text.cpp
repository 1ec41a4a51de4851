// SPDX-License-Identifier: Apache-2.0
// Formats the plan of an offloaded module as text.

#include <algorithm>
#include <cstdio>
#include <string>

#include "penstock/offload.h"

namespace penstock {

std::string Plan::explain() const {
  std::string text;
  const auto add = [&](const char* where, const Group& group) {
    char times[64] = "";
    if (group.worker_s > 0 || group.trainer_s > 0)
      std::snprintf(times, sizeof times, ", %.2f ms a batch", 1e3 * std::max(group.worker_s, group.trainer_s));
    text += std::string(where) + group.label + times + ": " + group.reason + "\n";
  };
  for (const Group& group : moved) add("worker   ", group);
  for (const Group& group : kept) add("trainer  ", group);
  for (const std::string& reason : refused) text += "refused  " + reason + "\n";
  return text;
}

}  // namespace penstock
