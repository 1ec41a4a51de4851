// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fingerprints of the numerics of a process's kernels. The last bits of exponentials, sums and matrix products depend
// on the instruction set of the CPU and on the libraries; a fingerprint for each family of kernels shows whether two
// processes compute the same results.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock {

enum class NumericFamily : uint8_t {
  kArithmetic,     // copies, casts, comparisons, integers, single IEEE operations: equal on every conforming CPU
  kComplex,        // the same operators on complex numbers
  kFused,          // a product and a sum, which some CPUs round once
  kExponential,    // exponentials, logarithms and functions composed of them
  kTrigonometric,  // circular and hyperbolic functions
  kRoots,          // roots and powers
  kSums,           // sums, means, deviations
  kNormalising,    // softmax, layer and batch norms
  kMatrices,       // matrix products
  kConvolutions,
  kFourier,
  kInterpolation,
  kRandom,
  kOther,  // every other operator: its fingerprint covers all families and the instruction set
};
inline constexpr size_t kNumericFamilyCount = 14;

// Indexed by family. All zeros means that the process has no fingerprints.
using Numerics = std::array<uint64_t, kNumericFamilyCount>;

// Bit i is set for family i.
using FamilySet = uint32_t;
constexpr FamilySet set_of(NumericFamily family) { return FamilySet{1} << static_cast<uint8_t>(family); }

constexpr FamilySet differing_families(const Numerics& a, const Numerics& b) {
  FamilySet found = 0;
  for (size_t family = 0; family < kNumericFamilyCount; ++family)
    if (a[family] != b[family]) found |= FamilySet{1} << family;
  return found;
}

// The families of a set for display: "exponentials, sums".
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
