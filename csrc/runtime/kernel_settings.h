// SPDX-License-Identifier: Apache-2.0
#pragma once
// Everything that the bits of a result may depend on in addition to operator and operands: settings of the thread and
// of the process.

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
    // Torch has no query for this setting, a processor flag of this thread.
    volatile float denormal = 1e-40F;
    return {at::get_num_threads(),
            denormal * 1.0F == 0.0F,
            context.deterministicAlgorithms(),
            context.userEnabledMkldnn(),
            context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL),
            context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::CONV),
            c10::get_default_dtype()};
  }

  // Returns all settings that differ from torch's defaults, except the number of threads; empty if none differs.
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

  // Applies all settings that differ from the present ones, except the number of threads.
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

// Applies other settings to the calling thread, and restores the former ones in the destructor. The number of threads
// does not change.
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
