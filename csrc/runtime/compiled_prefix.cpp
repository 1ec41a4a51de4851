// SPDX-License-Identifier: Apache-2.0
#include "runtime/compiled_prefix.h"

#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "runtime/kernel_settings.h"

namespace penstock::runtime {

bool is_same_bits(const at::Tensor& a, const at::Tensor& b) {
  PENSTOCK_ASSERT(!a.is_meta() && !b.is_meta(), "meta tensors have no bits to compare");
  if (a.device() != b.device()) return false;
  if (!a.is_cpu()) {
    // A copy keeps the strides of a dense tensor; others would get a new layout.
    return a.sizes() == b.sizes() && a.strides() == b.strides() && is_same_bits(a.cpu(), b.cpu());
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.strides() != b.strides()) return false;
  if (a.is_conj() != b.is_conj() || a.is_neg() != b.is_neg()) return false;
  const at::Tensor first = a.contiguous();
  const at::Tensor second = b.contiguous();
  return first.nbytes() == 0 || std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes()) == 0;
}

bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& first, const at::Tensor& second) { return is_same_bits(first, second); });
}

namespace {

Result<FileDescriptor> in_memory(std::string_view library) {
  FileDescriptor fd(::memfd_create("penstock-prefix", MFD_CLOEXEC));
  while (fd && !library.empty()) {
    const ssize_t written = ::write(fd.get(), library.data(), library.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    library.remove_prefix(static_cast<size_t>(written));
  }
  if (!fd || !library.empty())
    return Fault{Errc::kNoMemory,
                 std::string("a compiled prefix cannot be written to memory: ") + std::strerror(errno)};
  return fd;
}

}  // namespace

struct CompiledPrefix::Library {
  // Kept open as long as the library is loaded: the dynamic linker identifies the library by the descriptor's name, and
  // would return it again for another library with the same descriptor number.
  FileDescriptor fd;
  torch::inductor::AOTIModelContainerRunnerCpu runner;

  explicit Library(FileDescriptor its_fd)
      : fd(std::move(its_fd)),
        runner("/proc/self/fd/" + std::to_string(fd.get()), /*num_models=*/1, /*run_single_threaded=*/true) {}
};

CompiledPrefix::CompiledPrefix(std::unique_ptr<Library> library, std::vector<LeafLayout> leaves)
    : library_(std::move(library)), leaves_(std::move(leaves)) {}
CompiledPrefix::CompiledPrefix(CompiledPrefix&&) noexcept = default;
CompiledPrefix& CompiledPrefix::operator=(CompiledPrefix&&) noexcept = default;
CompiledPrefix::~CompiledPrefix() = default;

Result<CompiledPrefix> CompiledPrefix::load(std::string_view library, std::vector<LeafLayout> leaves) {
  auto fd = in_memory(library);
  if (!fd) return fd.error();
  try {
    return CompiledPrefix(std::make_unique<Library>(std::move(fd).value()), std::move(leaves));
  } catch (const std::exception& error) {
    return Fault{Errc::kUnsupported, std::string("a compiled prefix cannot be loaded: ") + error.what()};
  }
}

bool CompiledPrefix::accepts(std::span<const at::Tensor> leaves) const {
  for (const LeafLayout& layout : leaves_) {
    if (layout.leaf_index >= leaves.size()) return false;
    const at::Tensor& leaf = leaves[layout.leaf_index];
    if (!leaf.defined() || !leaf.is_cpu() || leaf.layout() != c10::Layout::Strided ||
        leaf.scalar_type() != layout.dtype || leaf.sizes() != layout.sizes || leaf.strides() != layout.strides)
      return false;
  }
  return true;
}

Result<std::vector<at::Tensor>> CompiledPrefix::run(std::span<const at::Tensor> leaves) const {
  const ExecutionGuard guard;
  std::vector<at::Tensor> inputs;
  inputs.reserve(leaves_.size());
  for (const LeafLayout& layout : leaves_) inputs.push_back(leaves[layout.leaf_index]);
  try {
    return library_->runner.run(inputs);
  } catch (const std::exception& error) {
    return Fault{Errc::kUnsupported, std::string("a compiled prefix failed: ") + error.what()};
  }
}

}  // namespace penstock::runtime
