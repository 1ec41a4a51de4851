// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random numbers that belong to a batch, not to the process that draws them: a worker and the trainer draw the same
// ones for the same batch, and the generators of both continue as if they had not been used.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <mutex>

namespace penstock::runtime {

// Returns the seed for one prefix's draws for one batch. The steps and the finalizer are from SplitMix64 (Steele, Lea,
// Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once for each of the three numbers.
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
