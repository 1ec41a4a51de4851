// SPDX-License-Identifier: Apache-2.0
#pragma once
// Snapshots of the generators that an epoch's order and base seed are drawn from.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "penstock/value.h"

namespace penstock::api {

// Draws a seed as torch's loader does: from `generator`, or without one from torch's default generator.
int64_t draw_seed(const std::optional<at::Generator>& generator);

// A value type.
class GeneratorSnapshot {
 public:
  // Captures the current states. `own` is the generator that the program passed to the loader.
  static GeneratorSnapshot take(const std::optional<at::Generator>& own);
  // Leaves out torch's default generator, which differs between the ranks of a job.
  static GeneratorSnapshot take_own(const std::optional<at::Generator>& own);
  // Throws for a value that neither to_value() nor Python's loader made.
  static GeneratorSnapshot from_value(const Value& value);

  // The part "generators" of a state. States of Python-only generators in a loaded state are kept.
  Value to_value(bool shuffles) const;

  void put_back_default() const;
  void put_back_own(const std::optional<at::Generator>& own) const;
  bool is_of_now() const;

 private:
  at::Tensor of_default_;  // torch's default generator; undefined in a state that leaves it out
  at::Tensor of_own_;      // undefined if there is none
  Value of_random_;        // Python's `random`, and numpy's: none in a state made by C++
  Value of_numpy_;
};

// Sets torch's default generator to a snapshot's state for the duration of its scope.
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
