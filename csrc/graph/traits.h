// SPDX-License-Identifier: Apache-2.0
#pragma once
// The facts about one call of an operator, in terms that do not need torch: filled by annotate() from the dispatcher's
// schema and tags, read by the effect analysis. A default-constructed Traits means that its effect is unknown.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace penstock::graph {

using ValueId = uint32_t;

enum class Purity : uint8_t {
  kUnknown,   // may do anything, also to its operands
  kOpaque,    // not known, but the front end guarantees that it does not write its operands
  kPure,      // its results depend only on its operands
  kMetadata,  // the same, and of tensors it only reads sizes and dtype
  kRandom,    // draws from a generator
  kState,     // known, and must not be moved; `reason` explains why
};

enum class ValueKind : uint8_t {
  kUnknown,
  kTensor,
  kTensorList,
  kNumber,  // int, float, bool
  kNumberList,
};

struct Traits {
  Purity purity = Purity::kUnknown;
  std::string reason =
      "its effect was not analysed";                 // kUnknown and kState: the clause that follows the operator's name
  std::vector<ValueId> writes;                       // operands that it changes in place
  std::vector<std::pair<ValueId, ValueId>> aliases;  // (result, operand) that may share memory
  std::vector<ValueKind> result_kinds;               // by result

  friend bool operator==(const Traits&, const Traits&) = default;
};

}  // namespace penstock::graph
