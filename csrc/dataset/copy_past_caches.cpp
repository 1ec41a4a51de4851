// SPDX-License-Identifier: Apache-2.0
#include "dataset/copy_past_caches.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace penstock::dataset {

void copy_past_caches(void* target, const void* source, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLineBytes = 64;
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  // A line that is written in full leaves the processor as a whole; the ends are copied with memcpy.
  const size_t misalignment = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t head_bytes = std::min(bytes, (kLineBytes - misalignment) % kLineBytes);
  std::memcpy(to, from, head_bytes);
  size_t at = head_bytes;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    const auto* words = reinterpret_cast<const __m128i*>(from + at);
    const __m128i first = _mm_loadu_si128(words);
    const __m128i second = _mm_loadu_si128(words + 1);
    const __m128i third = _mm_loadu_si128(words + 2);
    const __m128i fourth = _mm_loadu_si128(words + 3);
    auto* line = reinterpret_cast<__m128i*>(to + at);
    _mm_stream_si128(line, first);
    _mm_stream_si128(line + 1, second);
    _mm_stream_si128(line + 2, third);
    _mm_stream_si128(line + 3, fourth);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
#else
  std::memcpy(target, source, bytes);
#endif
}

}  // namespace penstock::dataset
