// SPDX-License-Identifier: Apache-2.0
#include "graph/sha256.h"

#include <gtest/gtest.h>

namespace penstock::graph {
namespace {

std::string digest(std::string_view text, size_t piece_bytes) {
  Sha256 hash;
  for (size_t i = 0; i < text.size(); i += piece_bytes) hash.update(text.substr(i, piece_bytes));
  std::string hex;
  for (const uint8_t byte : hash.finish()) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

// FIPS 180-4's examples, as NIST publishes them.
TEST(Sha256, MatchesThePublishedExamples) {
  EXPECT_EQ(digest("", 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest(std::string(1'000'000, 'a'), 1000),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnHowTheMessageIsCut) {
  for (size_t size : {0, 1, 54, 55, 56, 63, 64, 65, 119, 120, 127, 128, 200}) {
    const std::string text(size, 'x');
    for (size_t piece : {1, 7, 64, 1000}) EXPECT_EQ(digest(text, piece), digest(text, 1000)) << size << " by " << piece;
  }
}

}  // namespace
}  // namespace penstock::graph
