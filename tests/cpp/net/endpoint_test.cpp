// SPDX-License-Identifier: Apache-2.0
#include "net/endpoint.h"

#include <gtest/gtest.h>

#include <string>

namespace penstock::net {
namespace {

TEST(Endpoint, HostsOfEveryKindAreReadAndWrittenBack) {
  EXPECT_EQ(Endpoint::parse("tcp://127.0.0.1:5555").value(), (Endpoint{.host = "127.0.0.1", .port = 5555}));
  EXPECT_EQ(Endpoint::parse("tcp://[::1]:0").value(), (Endpoint{.host = "::1", .port = 0}));
  EXPECT_EQ(Endpoint::parse("tcp://node-7.example.org:65535").value().host, "node-7.example.org");
  EXPECT_EQ(Endpoint::parse("tcp://*:5555").value().host, "*");
  for (const auto* text : {"tcp://127.0.0.1:5555", "tcp://[fe80::1]:1", "tcp://localhost:80", "tcp://*:0"}) {
    EXPECT_EQ(Endpoint::parse(text).value().text(), text);
  }
}

class BadEndpoint : public testing::TestWithParam<std::string> {};

TEST_P(BadEndpoint, IsRefusedWithAnExample) {
  const auto endpoint = Endpoint::parse(GetParam());
  ASSERT_FALSE(endpoint) << endpoint.value().text();
  EXPECT_EQ(endpoint.error().code, Errc::kMalformed);
  EXPECT_NE(endpoint.error().message.find("tcp://HOST:PORT"), std::string::npos) << endpoint.error().message;
}

INSTANTIATE_TEST_SUITE_P(Endpoint, BadEndpoint,
                         testing::Values("", "tcp://", "127.0.0.1:5555", "ipc://@penstock", "inproc://a:1",
                                         "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
                                         "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:+1",
                                         "tcp://127.0.0.1:1 ", "tcp://:5555", "tcp://::1:5555", "tcp://[::1:5555",
                                         "tcp://[]:5555", "tcp://[127.0.0.1]:5555", "tcp://[::1%lo]:5555",
                                         "tcp://a b:5555", "tcp://a;b:5555", "tcp://eth0;127.0.0.1:5555",
                                         "tcp://a/b:5555", "tcp://user@host:5555", std::string("tcp://a\0b:1", 11),
                                         "tcp://" + std::string(254, 'a') + ":1",
                                         "tcp://" + std::string(100'000, ':')));

bool is_loopback(const std::string& host) { return resolve_bind_address({.host = host}).value().is_loopback; }

TEST(Endpoint, LoopbackIsToldByTheAddress) {
  for (const auto* host : {"127.0.0.1", "127.3.2.1", "127.1", "2130706433", "::1", "localhost", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(is_loopback(host)) << host;
  }
  for (const auto* host : {"*", "0.0.0.0", "0", "::", "10.0.0.1", "128.0.0.1", "::ffff:10.0.0.1", "fe80::1"}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(Endpoint, ANameIsBoundAsTheAddressThatWasLookedUp) {
  EXPECT_EQ(resolve_bind_address({.host = "localhost"}).value().number, "127.0.0.1");
  EXPECT_EQ(resolve_bind_address({.host = "127.1"}).value().number, "127.0.0.1");
  EXPECT_TRUE(resolve_bind_address({.host = "::1"}).value().is_ipv6);
}

TEST(Endpoint, AnUnknownHostIsAnErrorThatNamesIt) {
  const auto address = resolve_bind_address({.host = "no-such-host.invalid"});
  ASSERT_FALSE(address);
  EXPECT_NE(address.error().message.find("no-such-host.invalid"), std::string::npos) << address.error().message;
}

}  // namespace
}  // namespace penstock::net
