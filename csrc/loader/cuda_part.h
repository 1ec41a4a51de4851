// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only door to device streams: a CUDA device whose copies run on a side stream. Every call is made with that device
// current, and does no harm to a CUDA graph that another thread captures meanwhile (relaxed_capture.h). It is part of
// libpenstock_cuda.so alone, which cuda_device.h loads.

#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

// kUnsupported where no such device is.
Result<std::unique_ptr<Device>> make_cuda_device(int device_index);

// Puts the calling thread into the relaxed mode, or returns false. `mode_before` is for restore_capture().
bool try_relax_capture(int& mode_before);
void restore_capture(int mode_before);

}  // namespace penstock::loader
