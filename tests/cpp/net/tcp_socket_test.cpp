// SPDX-License-Identifier: Apache-2.0
#include "net/tcp_socket.h"

#include <gtest/gtest.h>

#include <string>

namespace penstock::net {
namespace {

TEST(TcpSocket, TheLibraryOfThisProcessWillDo) {
  EXPECT_TRUE(check_zmq(ZmqFacts::of_this_process()));
  EXPECT_TRUE(check_zmq({.major = 4, .minor = 3, .patch = 3, .has_curve = true}));
  EXPECT_TRUE(check_zmq({.major = 5, .minor = 0, .patch = 0, .has_curve = true}));
}

TEST(TcpSocket, ALibraryBeforeItsRepairsIsRefused) {
  for (const ZmqFacts& facts : {ZmqFacts{.major = 4, .minor = 3, .patch = 2, .has_curve = true},
                                ZmqFacts{.major = 4, .minor = 2, .patch = 9, .has_curve = true},
                                ZmqFacts{.major = 3, .minor = 9, .patch = 9, .has_curve = true}}) {
    const auto checked = check_zmq(facts);
    ASSERT_FALSE(checked);
    EXPECT_EQ(checked.error().code, Errc::kUnsupported);
    EXPECT_NE(checked.error().message.find("4.3.3"), std::string::npos) << checked.error().message;
  }
}

TEST(TcpSocket, ALibraryWithoutCurveIsRefused) {
  const auto checked = check_zmq({.major = 4, .minor = 3, .patch = 5, .has_curve = false});
  ASSERT_FALSE(checked);
  EXPECT_NE(checked.error().message.find("CURVE"), std::string::npos) << checked.error().message;
}

}  // namespace
}  // namespace penstock::net
