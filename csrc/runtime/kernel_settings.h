// SPDX-License-Identifier: Apache-2.0
#pragma once
// KernelSettings holds everything that the bits of a result may depend on in addition to operator and operands:
// settings of the thread and of the process. The guards set the thread's state for the operators of a prefix, and the
// generator for random draws that belong to a batch.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace penstock::runtime {

// The settings of one thread and its process. A value type.
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

// Sets torch's thread-local state for running the operators of a prefix, and restores it in the destructor.
//
// Results are plain tensors that the trainer's autograd can use: inference mode would be a little faster, but its
// tensors cannot be saved for backward. Autocast is off because a capture under autocast contains its casts as separate
// operators. Python's dispatch modes are left out, since they would take the GIL at every operator.
class ExecutionGuard {
 public:
  ExecutionGuard() = default;
  ExecutionGuard(const ExecutionGuard&) = delete;
  ExecutionGuard& operator=(const ExecutionGuard&) = delete;

 private:
  c10::AutoGradMode no_grad_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Returns the seed for one prefix's draws for one batch. Such random numbers belong to the batch, not to the process
// that draws them: a worker and the trainer draw the same ones for the same batch, and with a GeneratorGuard the
// generators of both continue as if they had not been used. The steps and the finalizer are from SplitMix64 (Steele,
// Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once for each of the three
// numbers.
inline uint64_t seed_of_batch(uint64_t prefix_seed, uint64_t epoch_seed, uint64_t sequence) {
  uint64_t state = 0;
  for (const uint64_t number : {prefix_seed, epoch_seed, sequence}) {
    state = (state ^ number) + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return state;
}

// Restores the state of torch's CPU generator in the destructor. Operators lock the generator themselves; the caller
// ensures that it has no other users meanwhile.
class GeneratorGuard {
 public:
  GeneratorGuard() : generator_(at::detail::getDefaultCPUGenerator()), state_(read_state(generator_)) {}
  ~GeneratorGuard() {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(state_);
  }
  // Also seeds it as `torch.manual_seed` does.
  explicit GeneratorGuard(uint64_t seed) : GeneratorGuard() {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }
  GeneratorGuard(const GeneratorGuard&) = delete;
  GeneratorGuard& operator=(const GeneratorGuard&) = delete;

 private:
  static at::Tensor read_state(at::Generator& generator) {
    const std::scoped_lock lock(generator.mutex());
    return generator.get_state();
  }

  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace penstock::runtime
