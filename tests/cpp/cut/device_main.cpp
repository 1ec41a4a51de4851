// SPDX-License-Identifier: Apache-2.0
#include "device_main.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "graph/device_bits.h"

namespace penstock {
namespace {

bool is_simulated() { return !at::hasCUDA(); }

// What is equal on a GPU is equal there. A division is the CPU's, and needs no other form.
void add_bits() {
  const auto replace_all = [](std::string& text, const std::string& from, const std::string& to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
      text.replace(at, from.size(), to);
  };
  for (const std::string_view table : graph::device_bits_tables()) {
    std::string text(table);
    replace_all(text, "\ndevice cuda\n", "\ndevice simgpu\n");
    replace_all(text, "\nreciprocal ", "\nequal ");
    ASSERT_TRUE(graph::add_device_bits(text));
  }
}

}  // namespace

c10::Device test_device() { return {is_simulated() ? c10::kPrivateUse1 : c10::kCUDA, 0}; }

bool give_other_bits(const std::vector<std::string>& operators) {
  if (!is_simulated()) return false;
  auto set = c10::Dispatcher::singleton().findSchemaOrThrow("simgpu::alter_operators", "");
  c10::Stack stack{c10::IValue(operators)};
  set.callBoxed(stack);
  return true;
}

}  // namespace penstock

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!at::hasCUDA()) {
    c10::register_privateuse1_backend("simgpu");
    if (dlopen(PENSTOCK_TEST_BINARY_DIR "/libsimgpu.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    penstock::add_bits();
  }
  return RUN_ALL_TESTS();
}
