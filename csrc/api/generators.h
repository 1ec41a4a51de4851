// SPDX-License-Identifier: Apache-2.0
#pragma once
// The generators that an epoch's order and base seed are drawn from, as they were at one moment.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "penstock/value.h"

namespace penstock::api {

// The draw of torch's loader: from `generator`, or from torch's default generator without one.
int64_t draw_seed(const std::optional<at::Generator>& generator);

// A value type.
class GeneratorSnapshot {
 public:
  // As they are now. `own` is the generator that the program gave to the loader.
  static GeneratorSnapshot take(const std::optional<at::Generator>& own);
  // Without torch's default generator, which is each rank's own where a job has several.
  static GeneratorSnapshot take_own(const std::optional<at::Generator>& own);
  // Throws for a value that to_value() did not make, nor Python's loader.
  static GeneratorSnapshot from_value(const Value& value);

  // The part "generators" of a state. Those of Python's own that a state brought along stay in it.
  Value to_value(bool shuffles) const;

  void put_back_default() const;
  void put_back_own(const std::optional<at::Generator>& own) const;
  bool is_of_now() const;

 private:
  at::Tensor of_default_;  // of torch's default generator; undefined in a state that leaves it alone
  at::Tensor of_own_;      // undefined without one
  Value of_random_;        // Python's `random`, and numpy's: none in a state that C++ made
  Value of_numpy_;
};

// torch's default generator as a snapshot has it, for the time of its scope.
class GeneratorsReplayed {
 public:
  explicit GeneratorsReplayed(const GeneratorSnapshot& snapshot);
  GeneratorsReplayed(const GeneratorsReplayed&) = delete;
  GeneratorsReplayed& operator=(const GeneratorsReplayed&) = delete;
  ~GeneratorsReplayed();

 private:
  GeneratorSnapshot before_;
};

}  // namespace penstock::api
