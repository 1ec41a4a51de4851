// SPDX-License-Identifier: Apache-2.0
#include "loader/relaxed_capture.h"

#include "loader/cuda_device.h"
#include "loader/cuda_entries.h"

namespace penstock::loader {

RelaxedCapture::RelaxedCapture() : cuda_(cuda_part()) {
  if (cuda_ != nullptr) is_relaxed_ = cuda_->try_relax_capture(mode_before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (is_relaxed_) cuda_->restore_capture(mode_before_);
}

}  // namespace penstock::loader
