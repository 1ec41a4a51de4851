// SPDX-License-Identifier: Apache-2.0
#pragma once
// The device of these tests: a GPU where torch has one, and else the simulated one of tests/simgpu.

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace penstock {

c10::Device test_device();

// Has the simulated device give another last bit for these operators ("aten::exp"), until it is called with none. False
// on a GPU, which has other bits of its own.
bool give_other_bits(const std::vector<std::string>& operators);

}  // namespace penstock
