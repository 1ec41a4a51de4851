// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device of whatever type torch has, by what torch asks of every backend: its guard, streams and events. CUDA's own
// part (cuda_part.h) registers slabs and widens besides, so it is taken for CUDA.

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

// kUnsupported where torch has no such device, or the device has no streams.
Result<std::unique_ptr<Device>> open_accelerator(c10::Device device);

// The device of that name, "cuda:0"; none without one. Throws c10::Error for a text that is no name of a device.
std::optional<c10::Device> device_named(const std::optional<std::string>& name);

// The device by its own part for CUDA, else as open_accelerator().
Result<std::unique_ptr<Device>> open_device(c10::Device device);

}  // namespace penstock::loader
