// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conditions on the sizes of a batch: whether a program that was written down with symbols for some sizes is the right
// one for a batch, and which strides the batch's tensors must have then. They are asked at every call, so the answer
// for a combination of sizes is kept.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace penstock::graph {

// An expression over the symbols of sizes. Truths are 0 and 1. Division rounds down, and a remainder has the divisor's
// sign, as in Python.
struct SizeExpression {
  enum class Op : uint8_t {
    kInteger,  // `value`
    kSymbol,   // the size at the place `value`
    kAdd,
    kMul,
    kFloorDiv,
    kMod,
    kMax,
    kMin,
    kEq,
    kNe,
    kLt,
    kLe,
    kGt,
    kGe,
    kAnd,
    kOr,
    kNot,
  };
  Op op = Op::kInteger;
  int64_t value = 0;
  std::vector<SizeExpression> operands{};  // one of kNot, two of comparisons, at least one of the others
};

// None where it divides by zero, or a number is beyond 64 bits. A symbol without a size asserts.
std::optional<int64_t> evaluate(const SizeExpression& expression, std::span<const int64_t> sizes);

// Thread-compatible.
class SizeConditions {
 public:
  using Strides = std::vector<std::vector<int64_t>>;
  // How many combinations of sizes are remembered before they are all forgotten.
  static constexpr size_t kRememberedMax = 4096;

  SizeConditions(std::vector<SizeExpression> guards, std::vector<std::vector<SizeExpression>> strides)
      : guards_(std::move(guards)), strides_(std::move(strides)) {}

  // The strides of each tensor under these sizes of the symbols, or null where the program is for other sizes. It is
  // valid until the next call. Sizes 0 and 1 broadcast and are empty in ways that larger ones are not, so a symbol
  // never stands for them.
  const Strides* strides_for(const std::vector<int64_t>& sizes) {
    return strides_for(sizes, [] { return true; });
  }
  // The strides as above under one more condition, which is asked where the others hold and the answer is not known
  // yet.
  template <typename Holds>
  const Strides* strides_for(const std::vector<int64_t>& sizes, const Holds& holds) {
    auto known = answers_.find(sizes);
    if (known == answers_.end()) {
      if (answers_.size() >= kRememberedMax) answers_.clear();
      std::optional<Strides> answer = look(sizes);
      if (answer && !holds()) answer.reset();
      known = answers_.emplace(sizes, std::move(answer)).first;
    }
    return known->second ? &*known->second : nullptr;
  }

 private:
  std::optional<Strides> look(const std::vector<int64_t>& sizes) const;

  const std::vector<SizeExpression> guards_;
  const std::vector<std::vector<SizeExpression>> strides_;
  std::map<std::vector<int64_t>, std::optional<Strides>> answers_;
};

}  // namespace penstock::graph
