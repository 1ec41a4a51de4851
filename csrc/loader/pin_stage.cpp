// SPDX-License-Identifier: Apache-2.0
// The stage behind pin_memory=True. The copy is one memcpy on the I/O thread, where torch uses a Python thread.
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "loader/device_stage.h"

namespace penstock::loader {
namespace {

class PinStage final : public BatchStage {
 public:
  Result<void> begin(Batch& batch) override {
    if (batch.raises()) return {};
    try {
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
      return Error{Errc::kFailed,
                   std::string("copying a batch to pinned memory failed: ") + error.what_without_backtrace()};
    }
    return {};
  }

  void finish(Batch&) override {}
  size_t reclaim() override { return 0; }
};

}  // namespace

std::unique_ptr<BatchStage> make_pin_stage() { return std::make_unique<PinStage>(); }

}  // namespace penstock::loader
