// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_device.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "device/cuda_part.h"

namespace penstock::device {
namespace {

constexpr const char* kFileName = "libpenstock_cuda.so";

// The file in the folder of the library that contains this code. Otherwise only the file name, which is searched for in
// the library's search path, as in a build folder.
std::string file_to_load() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&file_to_load), &info) == 0 || info.dli_fname == nullptr) return kFileName;
  std::error_code error;
  const auto beside = std::filesystem::path(info.dli_fname).parent_path() / kFileName;
  return std::filesystem::exists(beside, error) ? beside.string() : kFileName;
}

Result<const CudaEntries*> load() {
  const std::string file = file_to_load();
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string_view error = ::dlerror();
    if (file == kFileName && error.starts_with(kFileName)) {
      return Fault{Errc::kUnsupported,
                   "this build of penstock does not support CUDA; install a CUDA build of torch and nvcc, then rebuild "
                   "penstock, or pass device=None"};
    }
    return Fault{Errc::kUnsupported,
                 "penstock's library for CUDA " PENSTOCK_BUILT_FOR_CUDA " cannot be loaded with this torch (" +
                     std::string(error) + "); install torch for that CUDA version, or pass device=None"};
  }
  using Ask = const CudaEntries* (*)();
  const auto ask = reinterpret_cast<Ask>(::dlsym(library, kCudaEntriesName));
  const CudaEntries* const entries = ask == nullptr ? nullptr : ask();
  if (entries == nullptr || entries->size != sizeof(CudaEntries) ||
      entries->built_for != std::string_view(kCudaBuild)) {
    return Fault{Errc::kUnsupported, file + " belongs to another build than the library that loads it (" +
                                         std::string(kCudaBuild) +
                                         "): two versions of penstock were installed over each other; uninstall "
                                         "penstock until none is left, then reinstall it, or pass device=None"};
  }
  return entries;
}

// The result of the first call, including the reason of a failure.
const Result<const CudaEntries*>& loaded_part() {
  static Result<const CudaEntries*> part = load();
  return part;
}

}  // namespace

Result<std::unique_ptr<Device>> open_cuda_device(int device_index) {
  const auto& part = loaded_part();
  if (!part) {
    return Fault{Errc::kUnsupported,
                 "device cuda:" + std::to_string(device_index) + " was requested, but " + part.error().message};
  }
  return part.value()->make_device(device_index);
}

std::unique_ptr<WatchedMemory> open_cuda_watched_memory() {
  const auto& part = loaded_part();
  if (!part) return nullptr;
  auto memory = part.value()->make_watched_memory();
  return memory ? std::move(memory).value() : nullptr;
}

RelaxedCapture::RelaxedCapture() : cuda_(loaded_part() ? loaded_part().value() : nullptr) {
  if (cuda_ != nullptr) is_relaxed_ = cuda_->try_relax_capture(mode_before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (is_relaxed_) cuda_->restore_capture(mode_before_);
}

}  // namespace penstock::device
