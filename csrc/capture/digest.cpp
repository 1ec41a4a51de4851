// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>

#include <c10/core/GradMode.h>

#include "base/assert.h"
#include "capture/capture.h"
#include "graph/sha256.h"

namespace penstock::capture {

std::string content_digest(const at::Tensor& tensor) {
  PENSTOCK_ASSERT(tensor.is_cpu(), "the digest of a tensor on ", tensor.device().str());
  const c10::AutoGradMode no_grad(false);
  // Two tensors with equal elements have equal digests, independent of their memory layouts.
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  graph::Sha256 hash;
  std::string head = std::string(c10::toString(plain.scalar_type())) + " [";
  for (const int64_t size : plain.sizes()) head += std::to_string(size) + ",";
  hash.update(head + "]\n");
  hash.update(std::span(static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()));
  return graph::short_digest(hash);
}

}  // namespace penstock::capture
