// SPDX-License-Identifier: Apache-2.0
#pragma once
// What torch asks of a device: which one is current, its streams and events, its generators, what is pinned.

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace simgpu {

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);

const at::Generator& default_generator(c10::DeviceIndex device);
// The CPU's generator that a generator of the device draws from.
at::Generator& drawn_from(const at::Generator& generator);

}  // namespace simgpu
