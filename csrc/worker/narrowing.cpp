// SPDX-License-Identifier: Apache-2.0
#include "worker/narrowing.h"

#include <algorithm>

namespace penstock::worker {
namespace {

// The time to examine the values, write them and read them again, per byte of the tensor: measured with 64-bit integers
// that become 8 bits wide (bench/micro, BM_Narrow*), with a margin for a busier machine.
constexpr double kSecondsPerByte = 2e-9;
// After this many consecutive misses, a tensor is examined only once in kSkippedMax batches.
constexpr uint32_t kMissesMax = 4;
constexpr uint32_t kSkippedMax = 64;

}  // namespace

bool is_narrow_worthwhile(uint64_t plain_bytes, uint64_t narrow_bytes, double link_bytes_per_s) {
  if (link_bytes_per_s <= 0 || narrow_bytes >= plain_bytes) return false;
  const double saved_s = static_cast<double>(plain_bytes - narrow_bytes) / link_bytes_per_s;
  return saved_s > static_cast<double>(plain_bytes) * kSecondsPerByte;
}

std::vector<std::optional<wire::NarrowForm>> Narrowing::forms_of(const BatchContent& content, double link_bytes_per_s) {
  // If even the smallest possible form would not pay off, no tensor is examined.
  if (!is_narrow_worthwhile(wire::kWidenFactorMax, 1, link_bytes_per_s)) return {};
  std::vector<std::optional<wire::NarrowForm>> forms(content.tensors.size());
  bool is_any = false;
  for (size_t index = 0; index < content.tensors.size(); ++index) {
    const at::Tensor& tensor = content.tensors[index];
    if (std::binary_search(content.withheld.begin(), content.withheld.end(), index)) continue;
    const wire::TensorEntry entry = describe_tensor(tensor);
    if (entry.bytes < wire::kNarrowBytesMin) continue;
    Memory& memory = by_tensor_[index];
    if (memory.misses >= kMissesMax && ++memory.skipped < kSkippedMax) continue;
    memory.skipped = 0;
    const std::span bytes(static_cast<const std::byte*>(tensor.const_data_ptr()), entry.bytes);
    const auto form = wire::narrowest_form(entry, bytes);
    if (!form || !is_narrow_worthwhile(entry.bytes, form->bytes, link_bytes_per_s)) {
      ++memory.misses;
      continue;
    }
    memory.misses = 0;
    forms[index] = form;
    is_any = true;
  }
  if (!is_any) forms.clear();
  return forms;
}

}  // namespace penstock::worker
