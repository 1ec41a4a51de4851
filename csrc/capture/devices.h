// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts the IR's device names to torch's devices, and back.

#include <c10/core/Device.h>

#include <optional>

#include "graph/ir.h"

namespace penstock::capture {

graph::Device device_from_torch(const c10::Device& device);

// Returns none for the CPU, for the meta device, and for devices that torch does not have in this process.
std::optional<c10::Device> accelerator_of(const graph::Device& name);

}  // namespace penstock::capture
