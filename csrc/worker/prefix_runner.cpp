// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_runner.h"

#include <chrono>
#include <utility>

#include "runtime/same_bits.h"

namespace penstock::worker {
namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

}  // namespace

Result<Boundary> PrefixRunner::run(std::span<const at::Tensor> leaves, uint64_t seed) {
  using Choice = runtime::CompiledTrial::Choice;
  const bool can_choose = compiled_ && compiled_->accepts(leaves);
  switch (can_choose ? trial_.next() : Choice::kExecutor) {
    case Choice::kBoth: return compare(leaves, seed);
    case Choice::kCompiled: {
      auto made = compiled_->run(leaves);
      if (made) return Boundary{.tensors = std::move(made).value(), .is_compiled = true};
      trial_.refuse();
      break;
    }
    case Choice::kExecutor: break;
  }
  auto made = executor_.run(leaves, seed);
  if (!made) return made.error();
  return Boundary{.tensors = std::move(made).value()};
}

Result<Boundary> PrefixRunner::compare(std::span<const at::Tensor> leaves, uint64_t seed) {
  // The compiled code runs first, so that it does not benefit from finding the batch in the caches.
  auto begin = steady_clock::now();
  auto compiled = compiled_->run(leaves);
  const double compiled_s = seconds_since(begin);
  begin = steady_clock::now();
  auto made = executor_.run(leaves, seed);
  const double executor_s = seconds_since(begin);
  if (!made) return made.error();
  trial_.note(compiled && runtime::is_same_bits(compiled.value(), made.value()), executor_s, compiled_s);
  return Boundary{.tensors = std::move(made).value()};
}

}  // namespace penstock::worker
