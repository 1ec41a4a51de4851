// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranges for profilers: torch.profiler and all other observers of torch's RecordFunction, and Nsight if the environment
// variable PENSTOCK_NVTX is set. Without a profiler, a range takes a few nanoseconds.

#include <ATen/record_function.h>

namespace penstock::bindings {

// Whether a profiler observes the ranges of this thread.
bool is_profiled();

// A range from the constructor to the destructor. Confined to one thread, whose ranges end in the reverse order of
// their starts. The name must outlive the range.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
  bool is_in_nvtx_ = false;
};

}  // namespace penstock::bindings
