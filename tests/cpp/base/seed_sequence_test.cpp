// SPDX-License-Identifier: Apache-2.0
#include "base/seed_sequence.h"

#include <gtest/gtest.h>

#include <vector>

namespace penstock {
namespace {

using Words = std::vector<uint32_t>;

Words words_of(uint64_t entropy, const std::vector<uint64_t>& key, size_t count) {
  return SeedSequence(entropy, key).generate(count);
}

// By numpy.random.SeedSequence(entropy, spawn_key=key).generate_state(count) of numpy 2.
TEST(SeedSequence, TheWordsAreThoseOfNumpy) {
  EXPECT_EQ(words_of(0ULL, {}, 4), (Words{2968811710u, 3677149159u, 745650761u, 2884920346u}));
  EXPECT_EQ(words_of(1ULL, {}, 2), (Words{1835504127u, 1731038949u}));
  EXPECT_EQ(words_of(12345ULL, {0}, 2), (Words{959183449u, 3196577012u}));
  EXPECT_EQ(words_of(9223372036854775807ULL, {7}, 6),
            (Words{1606448494u, 2831522334u, 3407867740u, 2722164962u, 2825675954u, 3171159071u}));
  EXPECT_EQ(words_of(1099511627779ULL, {1, 8589934592ULL, 5}, 9),
            (Words{3640122634u, 1365519800u, 1994413172u, 235796669u, 849480991u, 3556711475u, 4085057401u, 2081324782u,
                   1988349374u}));
  EXPECT_EQ(words_of(42ULL, {3, 0, 2, 9, 11}, 5),
            (Words{1358575572u, 3807719820u, 4218813786u, 1845225893u, 3787890328u}));
}

}  // namespace
}  // namespace penstock
