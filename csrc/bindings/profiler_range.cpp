// SPDX-License-Identifier: Apache-2.0
#include "bindings/profiler_range.h"

#include <c10/util/Exception.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <string>
#include <string_view>

#include "base/process.h"

namespace penstock::bindings {
namespace {

bool has_nvtx() {
  const std::string wanted = environment("PENSTOCK_NVTX").value_or("");
  if (wanted.empty() || wanted == "0") return false;
  if (torch::profiler::impl::cudaStubs()->enabled()) return true;
  TORCH_WARN("PENSTOCK_NVTX is ", wanted,
             ", but this process has no NVTX: torch was built without CUDA, or found no GPU. Nsight therefore shows no "
             "ranges of penstock; unset PENSTOCK_NVTX here");
  return false;
}

// Looked up once, because it is checked for each batch.
bool writes_nvtx() {
  static const bool writes = has_nvtx();
  return writes;
}

}  // namespace

bool is_profiled() { return at::hasCallbacks() || writes_nvtx(); }

ProfilerRange::ProfilerRange(const char* name) : is_in_nvtx_(writes_nvtx()) {
  if (record_.isActive()) record_.before(std::string_view(name));
  if (is_in_nvtx_) torch::profiler::impl::cudaStubs()->rangePush(name);
}

ProfilerRange::~ProfilerRange() {
  if (is_in_nvtx_) torch::profiler::impl::cudaStubs()->rangePop();
}

}  // namespace penstock::bindings
