// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a process's kernels compute. Exponentials, sums and products of matrices have last bits that follow from the
// instruction set of the CPU and from the libraries; a fingerprint for each family of kernels shows whether two
// processes compute the same.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock {

enum class NumericFamily : uint8_t {
  kArithmetic,     // copies, casts, comparisons, integers, single IEEE operations: the same on every CPU that conforms
  kComplex,        // the same operators on complex numbers
  kFused,          // a product and a sum, which some CPUs round once
  kExponential,    // exponentials, logarithms and functions made of them
  kTrigonometric,  // circular and hyperbolic functions
  kRoots,          // roots and powers
  kSums,           // sums, means, deviations
  kNormalising,    // softmax, norms of layers and batches
  kMatrices,       // products of matrices
  kConvolutions,
  kFourier,
  kInterpolation,
  kRandom,
  kOther,  // every other operator: its fingerprint is of all families and of the instruction set
};
inline constexpr size_t kNumericFamilyCount = 14;

// By family. All zeros are the fingerprint of a process that has none.
using Numerics = std::array<uint64_t, kNumericFamilyCount>;

// Has bit i set for family i.
using FamilySet = uint32_t;
constexpr FamilySet set_of(NumericFamily family) { return FamilySet{1} << static_cast<uint8_t>(family); }

constexpr FamilySet differing_families(const Numerics& a, const Numerics& b) {
  FamilySet found = 0;
  for (size_t family = 0; family < kNumericFamilyCount; ++family)
    if (a[family] != b[family]) found |= FamilySet{1} << family;
  return found;
}

// The families of a set for people: "exponentials, sums".
inline std::string spoken_families(FamilySet families) {
  constexpr std::array<const char*, kNumericFamilyCount> kNames = {
      "arithmetic",     "complex numbers", "fused multiply-add", "exponentials", "trigonometry",       "roots",
      "sums",           "normalisation",   "matrices",           "convolutions", "Fourier transforms", "interpolation",
      "random numbers", "other operators"};
  std::string text;
  for (size_t family = 0; family < kNumericFamilyCount; ++family)
    if ((families >> family & 1) != 0) text += (text.empty() ? "" : ", ") + std::string(kNames[family]);
  return text;
}

}  // namespace penstock
