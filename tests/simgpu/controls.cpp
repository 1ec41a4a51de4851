// SPDX-License-Identifier: Apache-2.0
// What the tests ask of the simulated GPU, as torch.ops.simgpu.*: simgpu.py has names and words for them.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <chrono>
#include <string>
#include <vector>

#include "device.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

namespace simgpu {
namespace {

c10::DeviceIndex index_of(int64_t device) {
  TORCH_CHECK_VALUE(device >= 0 && device < kDeviceCount, "simgpu has devices 0 and 1, got ", device);
  return static_cast<c10::DeviceIndex>(device);
}

std::vector<int64_t> count_list() {
  const Counts c = counts();
  return {c.kernels, c.copies_in, c.bytes_in, c.copies_out, c.bytes_out, c.late_copies};
}

TORCH_LIBRARY(simgpu, m) {
  m.def("set_lost(bool is_lost) -> ()", [](bool is_lost) { Streams::get().set_lost(is_lost); });
  m.def("set_copy_delay(int microseconds) -> ()",
        [](int64_t us) { Streams::get().set_copy_delay(std::chrono::microseconds(us)); });
  m.def("set_held(bool is_held) -> ()", [](bool is_held) { Streams::get().set_held(is_held); });
  m.def("is_in_bad_fork() -> bool", [] { return Streams::get().is_in_bad_fork(); });
  m.def("is_used() -> bool", [] { return Streams::get().is_used(); });
  m.def("start() -> ()", [] { Streams::get().check(); });

  m.def("set_memory_limit(int device, int bytes) -> ()",
        [](int64_t device, int64_t bytes) { set_memory_limit(index_of(device), static_cast<size_t>(bytes)); });
  m.def("allocated_bytes(int device) -> int",
        [](int64_t device) { return static_cast<int64_t>(allocated_bytes(index_of(device))); });
  m.def("register_host(int base, int bytes) -> ()", [](int64_t base, int64_t bytes) {
    register_host(reinterpret_cast<const void*>(base), static_cast<size_t>(bytes));
  });
  m.def("unregister_host(int base) -> ()", [](int64_t base) { unregister_host(reinterpret_cast<const void*>(base)); });

  m.def("alter_operators(str[] names) -> ()", [](std::vector<std::string> names) { set_altered_operators(names); });
  m.def("record_operators(bool is_recording) -> ()", [](bool is_recording) { record_operators(is_recording); });
  m.def("recorded_operators() -> str[]", [] { return recorded_operators(); });
  m.def("counts() -> int[]", [] { return count_list(); });
  m.def("reset_counts() -> ()", [] { reset_counts(); });

  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    at::Generator generator = default_generator(index_of(device));
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("seed_of(int device) -> int",
        [](int64_t device) { return static_cast<int64_t>(default_generator(index_of(device)).current_seed()); });
  m.def("get_rng_state(int device) -> Tensor",
        [](int64_t device) { return default_generator(index_of(device)).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    at::Generator generator = default_generator(index_of(device));
    generator.set_state(state);
  });
}

}  // namespace
}  // namespace simgpu
