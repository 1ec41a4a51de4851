// SPDX-License-Identifier: Apache-2.0
#include "api/torch_check.h"

#include <dlfcn.h>

#include "penstock/error.h"

namespace penstock::api {
namespace {

std::string text(TorchVersion version) { return std::to_string(version.major) + "." + std::to_string(version.minor); }

}  // namespace

TorchVersion loaded_torch(TorchVersion otherwise) {
  using AbiVersion = uint64_t (*)();
  const auto ask = reinterpret_cast<AbiVersion>(::dlsym(RTLD_DEFAULT, "aoti_torch_abi_version"));
  if (ask == nullptr) return otherwise;
  const uint64_t version = ask();  // in the format of TORCH_ABI_VERSION in torch/headeronly/version.h
  return {.major = static_cast<int32_t>(version >> 56), .minor = static_cast<int32_t>(version >> 48 & 255)};
}

void check_torch(TorchVersion compiled_with, const std::string& who) {
  const TorchVersion own;
  if (compiled_with != own) {
    throw Error(ErrorKind::kUnsupported,
                who + " was compiled with the headers of torch " + text(compiled_with) +
                    ", but libpenstock was built for torch " + text(own) +
                    "; recompile it with find_package(Penstock), which finds the matching torch");
  }
  const TorchVersion loaded = loaded_torch(own);
  if (loaded != own) {
    throw Error(ErrorKind::kUnsupported, "libpenstock was built for torch " + text(own) + ", but torch " +
                                             text(loaded) +
                                             " is loaded in this process; check its path with ldd (LD_LIBRARY_PATH), "
                                             "or rebuild penstock with that torch");
  }
}

}  // namespace penstock::api
