// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version of penstock, the export macros of its shared library, and the torch version that a program is compiled
// with.

#include <torch/headeronly/version.h>

#include <cstdint>

#define PENSTOCK_VERSION "0.1.0"

#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error "penstock is built with _GLIBCXX_USE_CXX11_ABI=1, as torch is; remove the definition from the compiler options"
#endif

// Exports a symbol: the library is built with hidden visibility.
#define PENSTOCK_API __attribute__((visibility("default")))
// Hides a member of an exported class.
#define PENSTOCK_HIDDEN __attribute__((visibility("hidden")))

namespace penstock {

// The version of the torch headers that a program, a plug-in or the library was compiled with. Torch's C++ interface
// changes with each minor version; the library compares the versions and throws an Error of kind kUnsupported if they
// differ.
struct TorchVersion {
  int32_t major = TORCH_VERSION_MAJOR;
  int32_t minor = TORCH_VERSION_MINOR;

  friend bool operator==(const TorchVersion&, const TorchVersion&) = default;
};

}  // namespace penstock
