// SPDX-License-Identifier: Apache-2.0
#pragma once
// The facts about one call of an operator, in words that need no torch: filled by annotate() from the dispatcher's
// schema and tags, read by the effect analysis. A default-constructed Traits says that nothing is known.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace penstock::graph {

using ValueId = uint32_t;

enum class Purity : uint8_t {
  kUnknown,   // may do anything, to its operands too
  kOpaque,    // not known, but the front end vouches that it writes none of its operands
  kPure,      // its results depend on its operands alone
  kMetadata,  // the same, and of tensors it reads only sizes and dtype
  kRandom,    // draws from a generator
  kState,     // known, and never to be moved; `reason` says why
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
      "its effect was not looked up";                // kUnknown and kState: the clause that follows the operator's name
  std::vector<ValueId> writes;                       // operands that it changes in place
  std::vector<std::pair<ValueId, ValueId>> aliases;  // (result, operand) that may share memory
  std::vector<ValueKind> result_kinds;               // by result

  friend bool operator==(const Traits&, const Traits&) = default;
};

}  // namespace penstock::graph
