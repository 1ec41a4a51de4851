// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranges that profilers show: torch.profiler and all that listens to torch's RecordFunction, and Nsight where the
// variable PENSTOCK_NVTX is set. Where nobody looks, a range takes a few nanoseconds.

#include <ATen/record_function.h>

namespace penstock::bindings {

// Somebody looks at the ranges of this thread.
bool is_profiled();

// From its constructor to its destructor. Confined to one thread, whose ranges end in the opposite order of their
// beginnings. The name has to last as long.
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
