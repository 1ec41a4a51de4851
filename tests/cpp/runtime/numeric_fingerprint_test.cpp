// SPDX-License-Identifier: Apache-2.0
#include "runtime/numeric_fingerprint.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "graph/ir_text.h"
#include "runtime/kernel_families.h"

namespace penstock::runtime {
namespace {

TEST(NumericFingerprint, IsTheSameAtEachCallAndDiffersByFamily) {
  const Numerics& first = numeric_fingerprint();
  EXPECT_EQ(first, numeric_fingerprint());
  EXPECT_EQ(std::set<uint64_t>(first.begin(), first.end()).size(), kNumericFamilyCount);
}

TEST(NumericFingerprint, DifferingFamiliesAreNamed) {
  Numerics other = numeric_fingerprint();
  other[static_cast<size_t>(NumericFamily::kSums)] ^= 1;
  other[static_cast<size_t>(NumericFamily::kExponential)] ^= 1;
  const FamilySet differing = differing_families(numeric_fingerprint(), other);
  EXPECT_EQ(differing, set_of(NumericFamily::kSums) | set_of(NumericFamily::kExponential));
  EXPECT_EQ(spoken_families(differing), "exponentials, sums");
}

NumericFamily family_of(const std::string& call, const std::string& dtype = "float32") {
  const auto graph = graph::parse_graph("penstock-ir 1\ninput %x leaf 0 " + dtype + " [n]\n%y = " + call + "\n");
  return kernel_families(graph.value()).at(0);
}

TEST(KernelFamilies, AnUnknownOperatorIsOfNone) {
  EXPECT_EQ(family_of("aten::digamma(%x)"), NumericFamily::kOther);
  EXPECT_EQ(family_of("mine::add.Tensor(%x, %x)"), NumericFamily::kOther);
}

TEST(KernelFamilies, ASumWithAFactorIsFused) {
  EXPECT_EQ(family_of("aten::add.Tensor(%x, %x)"), NumericFamily::kArithmetic);
  EXPECT_EQ(family_of("aten::add.Tensor(%x, %x, alpha=1)"), NumericFamily::kArithmetic);
  EXPECT_EQ(family_of("aten::add.Tensor(%x, %x, alpha=2)"), NumericFamily::kFused);
  EXPECT_EQ(family_of("aten::sub.Scalar(%x, 1, 3)"), NumericFamily::kFused);
}

TEST(KernelFamilies, ArithmeticOfComplexNumbersIsAnother) {
  EXPECT_EQ(family_of("aten::mul.Tensor(%x, %x)", "complex64"), NumericFamily::kComplex);
  EXPECT_EQ(family_of("aten::exp(%x)", "complex64"), NumericFamily::kOther);
}

}  // namespace
}  // namespace penstock::runtime
