// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device of any type that torch supports, through the interface that torch requires of every backend: its guard,
// streams and events. CUDA's implementation (cuda_part.h) also registers slabs and widens, so CUDA devices use that.

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "device/device.h"

namespace penstock::device {

// Fails with kUnsupported if torch has no such device, or the device has no streams.
Result<std::unique_ptr<Device>> open_accelerator(c10::Device device);

// Returns the device with that name, for example "cuda:0"; nullopt without a name. Throws c10::Error if the text is not
// the name of a device.
std::optional<c10::Device> device_named(const std::optional<std::string>& name);

// Opens a CUDA device with CUDA's implementation, any other as open_accelerator() does.
Result<std::unique_ptr<Device>> open_device(c10::Device device);

}  // namespace penstock::device
