// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only door to device streams: a CUDA device whose copies run on a side stream. Every call is made with that device
// current, and does no harm to a CUDA graph that another thread captures meanwhile (relaxed_capture.h).

#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

// kUnsupported in a build without CUDA and where no such device is.
Result<std::unique_ptr<Device>> open_cuda_device(int device_index);

}  // namespace penstock::loader
