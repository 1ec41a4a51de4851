// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only access to device streams: a CUDA device whose copies run on a side stream. Every call is made with that
// device current, and does not disturb a CUDA graph that another thread is capturing (relaxed_capture.h). Part of
// libpenstock_cuda.so only, which cuda_device.h loads.

#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

// Fails with kUnsupported if there is no such device.
Result<std::unique_ptr<Device>> make_cuda_device(int device_index);

// Puts the calling thread into the relaxed mode, or returns false. `mode_before` is for restore_capture().
bool try_relax_capture(int& mode_before);
void restore_capture(int mode_before);

}  // namespace penstock::loader
