// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CPU time of this process, over all its threads, or of one thread.

#include <ctime>

#include <chrono>

namespace penstock::server {

inline std::chrono::nanoseconds cpu_time_by(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}
inline std::chrono::nanoseconds process_cpu_time() { return cpu_time_by(CLOCK_PROCESS_CPUTIME_ID); }
// Of the calling thread.
inline std::chrono::nanoseconds thread_cpu_time() { return cpu_time_by(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace penstock::server
