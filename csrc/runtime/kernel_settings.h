// SPDX-License-Identifier: Apache-2.0
#pragma once
// Everything that the bits of a result may depend on besides operator and operands: settings of the thread and of the
// process.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

namespace penstock::runtime {

struct KernelSettings {
  int thread_count = 1;  // sums are split among threads
  bool flushes_denormals = false;
  bool is_deterministic = false;
  bool uses_mkldnn = true;
  at::Float32Precision matmul_precision = at::Float32Precision::NONE;
  caffe2::TypeMeta default_dtype;

  static KernelSettings now() {
    const at::Context& context = at::globalContext();
    // Torch has no question for this one, which is a flag of the processor for this thread.
    volatile float denormal = 1e-40F;
    return {at::get_num_threads(),
            denormal * 1.0F == 0.0F,
            context.deterministicAlgorithms(),
            context.userEnabledMkldnn(),
            context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL),
            c10::get_default_dtype()};
  }

  friend bool operator==(const KernelSettings&, const KernelSettings&) = default;
};

}  // namespace penstock::runtime
