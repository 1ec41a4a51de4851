// SPDX-License-Identifier: Apache-2.0
#include "loader/pin_stage.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "loader/relaxed_capture.h"

namespace penstock::loader {

Result<void> PinStage::begin(Batch& batch) {
  const RelaxedCapture relaxed;  // torch asks the driver for pinned memory, and whether memory that was used is free
  try {
    if (auto mapped = batch.map_for_copy(); !mapped) return mapped;
    // Until torch has started the device it calls no memory pinned.
    if (const auto accelerator = at::getAccelerator()) at::globalContext().lazyInitDevice(*accelerator);
    std::vector<at::Tensor> pinned;
    pinned.reserve(batch.tensors().size());
    for (const at::Tensor& tensor : batch.tensors()) {
      if (tensor.is_meta()) {  // a leaf that stayed with its worker
        pinned.push_back(tensor);
        continue;
      }
      pinned.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(true)));
      pinned.back().copy_(tensor);
    }
    batch.replace_tensors(std::move(pinned));
  } catch (const c10::Error& error) {
    return Fault{Errc::kFailed,
                 std::string("copying a batch to pinned memory failed: ") + error.what_without_backtrace()};
  }
  return {};
}

}  // namespace penstock::loader
