// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version of penstock, the mark of what its shared library exports, and the torch that a program is compiled with.

#include <torch/headeronly/version.h>

#include <cstdint>

#define PENSTOCK_VERSION "0.1.0"

#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error \
    "penstock is built with _GLIBCXX_USE_CXX11_ABI=1, as torch is; leave the definition out of the compiler's options"
#endif

// The library is built with hidden symbols; what a program may use has this mark.
#define PENSTOCK_API __attribute__((visibility("default")))
// What a class with that mark keeps to the library.
#define PENSTOCK_HIDDEN __attribute__((visibility("hidden")))

namespace penstock {

// The version of torch whose headers a program, a plug-in or the library was compiled with. Torch's C++ interface
// changes from one minor version to the next; the library compares the versions, and throws Error kUnsupported where
// they differ.
struct TorchVersion {
  int32_t major = TORCH_VERSION_MAJOR;
  int32_t minor = TORCH_VERSION_MINOR;

  friend bool operator==(const TorchVersion&, const TorchVersion&) = default;
};

}  // namespace penstock
