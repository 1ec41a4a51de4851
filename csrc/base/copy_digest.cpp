// SPDX-License-Identifier: Apache-2.0
#include "base/copy_digest.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace penstock {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kStripeBytes = kLanes * sizeof(uint64_t);
constexpr size_t kBlockStripes = 16;
constexpr uint64_t kPrime = 0x9e3779b1;  // of 32 bits
constexpr int kFoldShift = 47;
constexpr size_t kPrefetchBytes = 2048;  // the processor's own prefetch ends with each page: 1.3 times the time

using Lanes = std::array<uint64_t, kLanes>;

// A stripe's keys start at its number in the block, the keys of the mixture at kBlockStripes.
constexpr auto kKeys = [] {
  std::array<uint64_t, kBlockStripes + kLanes> keys{};
  uint64_t state = 0;
  for (uint64_t& key : keys) {  // splitmix64
    state += 0x9e3779b97f4a7c15;
    key = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    key = (key ^ key >> 27) * 0x94d049bb133111eb;
    key ^= key >> 31;
  }
  return keys;
}();

#ifdef __SSE2__

// Two lanes and two words at a time.
struct Accumulator {
  __m128i first, second, third, fourth;

  explicit Accumulator(const Lanes& lanes)
      : first(at(lanes.data())), second(at(&lanes[2])), third(at(&lanes[4])), fourth(at(&lanes[6])) {}

  template <bool kCopies>
  void add(const std::byte* from, std::byte* to, size_t stripe) {
    first = added<kCopies>(first, from, to, &kKeys[stripe]);
    second = added<kCopies>(second, from + 16, to + 16, &kKeys[stripe + 2]);
    third = added<kCopies>(third, from + 32, to + 32, &kKeys[stripe + 4]);
    fourth = added<kCopies>(fourth, from + 48, to + 48, &kKeys[stripe + 6]);
  }

  void mix() {
    first = mixed(first, &kKeys[kBlockStripes]);
    second = mixed(second, &kKeys[kBlockStripes + 2]);
    third = mixed(third, &kKeys[kBlockStripes + 4]);
    fourth = mixed(fourth, &kKeys[kBlockStripes + 6]);
  }

  Lanes lanes() const {
    Lanes lanes;
    std::memcpy(lanes.data(), this, sizeof lanes);
    return lanes;
  }

 private:
  static __m128i at(const void* memory) { return _mm_loadu_si128(static_cast<const __m128i*>(memory)); }

  template <bool kCopies>
  static __m128i added(__m128i lanes, const std::byte* from, std::byte* to, const uint64_t* keys) {
    __m128i words = at(from);
    if constexpr (kCopies) {
      asm("" : "+x"(words));  // or the compiler might read the memory twice, which another process may change
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
    }
    const __m128i keyed = _mm_xor_si128(words, at(keys));
    const __m128i products = _mm_mul_epu32(keyed, _mm_shuffle_epi32(keyed, _MM_SHUFFLE(2, 3, 0, 1)));
    const __m128i neighbours = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm_add_epi64(_mm_add_epi64(lanes, products), neighbours);
  }

  static __m128i mixed(__m128i lanes, const uint64_t* keys) {
    const __m128i folded = _mm_xor_si128(_mm_xor_si128(lanes, _mm_srli_epi64(lanes, kFoldShift)), at(keys));
    const __m128i prime = _mm_set1_epi64x(kPrime);
    const __m128i high = _mm_mul_epu32(_mm_srli_epi64(folded, 32), prime);
    return _mm_add_epi64(_mm_mul_epu32(folded, prime), _mm_slli_epi64(high, 32));
  }
};
static_assert(sizeof(Accumulator) == sizeof(Lanes));

#else

struct Accumulator {
  Lanes lanes_;

  explicit Accumulator(const Lanes& lanes) : lanes_(lanes) {}

  template <bool kCopies>
  void add(const std::byte* from, std::byte* to, size_t stripe) {
    Lanes words;
    if constexpr (kCopies) {
      std::memcpy(to, from, sizeof words);
      from = to;
    }
    std::memcpy(words.data(), from, sizeof words);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t keyed = words[lane] ^ kKeys[stripe + lane];
      lanes_[lane] += (keyed & 0xffffffff) * (keyed >> 32) + words[lane ^ 1];
    }
  }

  void mix() {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t folded = lanes_[lane] ^ lanes_[lane] >> kFoldShift ^ kKeys[kBlockStripes + lane];
      lanes_[lane] = folded * kPrime;
    }
  }

  Lanes lanes() const { return lanes_; }
};

#endif

template <bool kCopies>
Lanes added(const Lanes& before, std::span<const std::byte> bytes, std::byte* to) {
  Accumulator accumulator(before);
  size_t stripe = 0;
  const auto end_stripe = [&] {
    if (++stripe < kBlockStripes) return;
    accumulator.mix();
    stripe = 0;
  };
  size_t place = 0;
  for (; place + kStripeBytes <= bytes.size(); place += kStripeBytes) {
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(bytes.data()) + place + kPrefetchBytes));
    accumulator.template add<kCopies>(bytes.data() + place, kCopies ? to + place : nullptr, stripe);
    end_stripe();
  }
  if (const size_t rest = bytes.size() - place; rest > 0) {
    std::array<std::byte, kStripeBytes> last{};
    std::memcpy(last.data(), bytes.data() + place, rest);
    if constexpr (kCopies) std::memcpy(to + place, last.data(), rest);
    accumulator.template add<false>(last.data(), nullptr, stripe);
  }
  Lanes lanes = accumulator.lanes();
  for (uint64_t& lane : lanes) lane += bytes.size();
  Accumulator ended(lanes);
  ended.mix();
  return ended.lanes();
}

}  // namespace

void CopyDigest::add(std::span<const std::byte> bytes) { lanes_ = added<false>(lanes_, bytes, nullptr); }

void CopyDigest::copy(std::span<const std::byte> bytes, std::byte* to) { lanes_ = added<true>(lanes_, bytes, to); }

// A word counts in two neighbouring lanes, so lanes that are folded together are not neighbours.
CopyDigest::Value CopyDigest::value() const {
  Value value{};
  for (size_t lane = 0; lane < value.size(); ++lane)
    value[lane] = (lanes_[lane] ^ lanes_[lane] >> 32) * 0x9e3779b97f4a7c15 + lanes_[lane + value.size()];
  return value;
}

}  // namespace penstock
