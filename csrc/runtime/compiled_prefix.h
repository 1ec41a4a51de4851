// SPDX-License-Identifier: Apache-2.0
#pragma once
// A prefix compiled by AOTInductor: a shared library, for batches of one size. The library is in memory private to this
// process, so no part of it is on disk.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace penstock::runtime {

// A tensor of the batch as the library expects it.
struct LeafLayout {
  uint32_t leaf_index = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// Thread-compatible. Must not be used across a fork.
class CompiledPrefix {
 public:
  // `leaves` are the library's inputs in order. Returns kUnsupported if the library cannot be loaded.
  static Result<CompiledPrefix> load(std::string_view library, std::vector<LeafLayout> leaves);
  CompiledPrefix(CompiledPrefix&&) noexcept;
  CompiledPrefix& operator=(CompiledPrefix&&) noexcept;
  ~CompiledPrefix();

  // Whether the library was compiled for batches with these leaves.
  bool accepts(std::span<const at::Tensor> leaves) const;

  // Returns the prefix's outputs in order, for leaves that it accepts. Returns kUnsupported if the library fails.
  Result<std::vector<at::Tensor>> run(std::span<const at::Tensor> leaves) const;

 private:
  struct Library;
  CompiledPrefix(std::unique_ptr<Library> library, std::vector<LeafLayout> leaves);

  std::unique_ptr<Library> library_;
  std::vector<LeafLayout> leaves_;
};

}  // namespace penstock::runtime
