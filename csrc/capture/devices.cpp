// SPDX-License-Identifier: Apache-2.0
#include "capture/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace penstock::capture {

graph::Device device_from_torch(const c10::Device& device) {
  graph::Device name{c10::DeviceTypeName(device.type(), /*lower_case=*/true), std::nullopt};
  if (device.has_index()) name.index = static_cast<uint32_t>(device.index());
  return name;
}

std::optional<c10::Device> accelerator_of(const graph::Device& name) {
  if (name.type == "cpu" || name.type == "meta") return std::nullopt;
  try {
    const c10::Device device(graph::name_of(name));
    if (c10::impl::hasDeviceGuardImpl(device.type())) return device;
  } catch (const c10::Error&) {
    // Torch does not know a device of that name.
  }
  return std::nullopt;
}

}  // namespace penstock::capture
