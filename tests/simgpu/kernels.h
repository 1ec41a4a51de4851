// SPDX-License-Identifier: Apache-2.0
#pragma once
// Operators of the simulated GPU: the CPU's kernels, on the bytes behind its tensors.

#include <cstdint>
#include <string>
#include <vector>

namespace simgpu {

// What the device was asked for, since the process began or since reset_counts().
struct Counts {
  int64_t kernels = 0;
  int64_t copies_in = 0;  // from the host
  int64_t bytes_in = 0;
  int64_t copies_out = 0;
  int64_t bytes_out = 0;
  int64_t late_copies = 0;  // of either kind, that did not wait
};

Counts counts();
void reset_counts();

// Has these operators ("aten::exp") give other last bits than the CPU's, in one of three values.
void set_altered_operators(std::vector<std::string> names);

// The operators that ran while they were recorded, in order.
void record_operators(bool is_recording);
std::vector<std::string> recorded_operators();

}  // namespace simgpu
