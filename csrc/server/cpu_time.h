// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long this process has been on CPUs, all its threads together.

#include <ctime>

#include <chrono>

namespace penstock::server {

inline std::chrono::nanoseconds process_cpu_time() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace penstock::server
