// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pillow's colour operations on 8-bit RGB images, byte for byte, in place: the blends of its ImageEnhance, conversions
// to gray and to HSV, and tables for single bytes. The operations work on any window of an image.
//
// Gray is (19595 R + 38470 G + 7471 B + 2^15) / 2^16, the luma of ITU-R BT.601. A blend is base + factor * (value -
// base) in float32, clipped, without the fraction. HSV is A. R. Smith's hexcone model ("Color Gamut Transform Pairs",
// 1978), as in Python's colorsys, with hue, saturation and value as bytes.

#include <cstdint>
#include <span>

#include "image/resample.h"

namespace penstock::image {

// What ImageEnhance.Brightness, Contrast and Color blend an image with.
enum class BlendBase : uint8_t {
  kBlack,
  kMean,  // of its gray values, rounded
  kGray,  // its own gray value, for each pixel
};

constexpr float kBlendFactorMax = 1e6F;

// The magnitude of `factor` must be kBlendFactorMax at most.
void blend(const Pixels& image, BlendBase base, float factor);

// Gives R, G and B the gray value.
void make_gray(const Pixels& image);

// Adds `shift` to the byte of the hue, modulo 256.
void shift_hue(const Pixels& image, uint8_t shift);

// Three tables of 256 bytes, for R, G and B.
using ByteTables = std::span<const uint8_t, size_t{3} * 256>;
void look_up(const Pixels& image, ByteTables tables);

}  // namespace penstock::image
