// SPDX-License-Identifier: Apache-2.0
#pragma once
// Everything that the bits of a result may depend on besides operator and operands: settings of the thread and of the
// process.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace penstock::runtime {

struct KernelSettings {
  int thread_count = 1;  // sums are split among threads
  bool flushes_denormals = false;
  bool is_deterministic = false;
  bool uses_mkldnn = true;
  at::Float32Precision matmul_precision = at::Float32Precision::NONE;
  at::Float32Precision convolution_precision = at::Float32Precision::NONE;
  caffe2::TypeMeta default_dtype = caffe2::TypeMeta::Make<float>();

  static KernelSettings now() {
    const at::Context& context = at::globalContext();
    // Torch has no question for this one, which is a flag of the processor for this thread.
    volatile float denormal = 1e-40F;
    return {at::get_num_threads(),
            denormal * 1.0F == 0.0F,
            context.deterministicAlgorithms(),
            context.userEnabledMkldnn(),
            context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL),
            context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV),
            c10::get_default_dtype()};
  }

  // All but the number of threads, where it is not torch's default; empty where everything is.
  std::string text() const {
    const auto is_plain = [](at::Float32Precision precision) {
      return precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
    };
    std::string text;
    if (flushes_denormals) text += "flush_denormal ";
    if (is_deterministic) text += "deterministic ";
    if (!uses_mkldnn) text += "no_mkldnn ";
    if (!is_plain(matmul_precision)) text += "matmul_" + std::to_string(static_cast<int>(matmul_precision)) + " ";
    if (!is_plain(convolution_precision))
      text += "conv_" + std::to_string(static_cast<int>(convolution_precision)) + " ";
    if (default_dtype != caffe2::TypeMeta::Make<float>()) text += std::string(default_dtype.name());
    return text;
  }

  // Sets all but the number of threads, where it is not so already.
  void apply() const {
    at::Context& context = at::globalContext();
    const KernelSettings present = now();
    if (flushes_denormals != present.flushes_denormals) at::Context::setFlushDenormal(flushes_denormals);
    if (is_deterministic != present.is_deterministic)
      context.setDeterministicAlgorithms(is_deterministic, context.deterministicAlgorithmsWarnOnly());
    if (uses_mkldnn != present.uses_mkldnn) context.setUserEnabledMkldnn(uses_mkldnn);
    if (matmul_precision != present.matmul_precision)
      context.setFloat32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL, matmul_precision);
    if (convolution_precision != present.convolution_precision)
      context.setFloat32Precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV, convolution_precision);
    if (default_dtype != present.default_dtype) c10::set_default_dtype(default_dtype);
  }

  friend bool operator==(const KernelSettings&, const KernelSettings&) = default;
};

// Has the calling thread compute under other settings, and puts the former ones back. The number of threads stays.
class KernelSettingsGuard {
 public:
  explicit KernelSettingsGuard(const KernelSettings& settings) : former_(KernelSettings::now()) { settings.apply(); }
  ~KernelSettingsGuard() { former_.apply(); }
  KernelSettingsGuard(const KernelSettingsGuard&) = delete;
  KernelSettingsGuard& operator=(const KernelSettingsGuard&) = delete;

 private:
  const KernelSettings former_;
};

}  // namespace penstock::runtime
