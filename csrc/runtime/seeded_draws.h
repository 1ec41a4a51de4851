// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random numbers that belong to a batch and not to the process that draws them: a worker and the trainer draw the same
// ones for the same batch, and the generator of either goes on as if nothing had been drawn.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <mutex>

namespace penstock::runtime {

// The seed of what one prefix draws for one batch. The steps and the finalizer are those of SplitMix64 (Steele, Lea,
// Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), taken once for each of the three numbers.
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

// Seeds torch's CPU generator as `torch.manual_seed` does, and puts it back when it goes. Operators lock the generator
// themselves; that nothing else draws meanwhile is for the caller to see to.
class SeededGenerator {
 public:
  explicit SeededGenerator(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::scoped_lock lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~SeededGenerator() {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(before_);
  }
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;

 private:
  at::Generator generator_;
  at::Tensor before_;
};

}  // namespace penstock::runtime
