// SPDX-License-Identifier: Apache-2.0
#include "net/endpoint.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "../base/watched_new.h"
#include "base/clock.h"

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

// A system's resolver whose answers the test gives, host by host.
class HandLookup {
 public:
  explicit HandLookup(const std::vector<std::string>& hosts) {
    for (const std::string& host : hosts) answers_[host] = std::make_shared<std::promise<Result<HostAddress>>>();
  }

  Resolver::Lookup function() {
    std::map<std::string, std::shared_future<Result<HostAddress>>> futures;
    for (const auto& [host, promise] : answers_) futures.emplace(host, promise->get_future().share());
    return [futures, count = count_](const std::string& host) {
      count->fetch_add(1);
      return futures.at(host).get();
    };
  }
  void answer(const std::string& host, Result<HostAddress> address) {
    answers_.at(host)->set_value(std::move(address));
  }
  int count() const { return count_->load(); }

 private:
  std::map<std::string, std::shared_ptr<std::promise<Result<HostAddress>>>> answers_;
  std::shared_ptr<std::atomic<int>> count_ = std::make_shared<std::atomic<int>>(0);
};

// Waits until the lookup of `host` has ended.
void await(Resolver& resolver, const std::string& host) {
  for (;;) {
    pollfd waited{.fd = resolver.fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&waited, 1, 30'000), 1);
    const auto done = resolver.take_done();
    if (std::find(done.begin(), done.end(), host) != done.end()) return;
  }
}

TEST(Resolver, NumberIsItsOwnAddressAtOnce) {
  const auto resolver = Resolver::open().value();
  EXPECT_EQ(resolver->try_resolve("127.0.0.1", clock_now())->value(),
            (HostAddress{.number = "127.0.0.1", .is_loopback = true}));
  EXPECT_EQ(resolver->try_resolve("::1", clock_now())->value(),
            (HostAddress{.number = "::1", .is_ipv6 = true, .is_loopback = true}));
  EXPECT_TRUE(resolver->take_done().empty());
}

TEST(Resolver, NameIsLookedUpBySystem) {
  const auto resolver = Resolver::open().value();
  EXPECT_FALSE(resolver->try_resolve("localhost", clock_now()));
  await(*resolver, "localhost");
  EXPECT_EQ(resolver->try_resolve("localhost", clock_now())->value().number, "127.0.0.1");
}

TEST(Resolver, UnknownNameIsAnErrorInTheSystemsWords) {
  const auto resolver = Resolver::open().value();
  EXPECT_FALSE(resolver->try_resolve("no-such-host.invalid", clock_now()));
  await(*resolver, "no-such-host.invalid");
  const auto address = resolver->try_resolve("no-such-host.invalid", clock_now());
  ASSERT_TRUE(address);
  ASSERT_FALSE(*address);
  EXPECT_FALSE(address->error().message.empty());
}

TEST(Resolver, SilentNameServerHoldsUpNoOtherHost) {
  HandLookup lookup({"slow", "quick"});
  const auto resolver = Resolver::open(lookup.function()).value();
  EXPECT_FALSE(resolver->try_resolve("slow", clock_now()));
  EXPECT_FALSE(resolver->try_resolve("quick", clock_now()));
  lookup.answer("quick", HostAddress{.number = "10.0.0.1"});
  await(*resolver, "quick");
  EXPECT_EQ(resolver->try_resolve("quick", clock_now())->value().number, "10.0.0.1");
  EXPECT_FALSE(resolver->try_resolve("slow", clock_now()));
  lookup.answer("slow", HostAddress{.number = "10.0.0.2"});
  await(*resolver, "slow");
  EXPECT_EQ(lookup.count(), 2);
}

TEST(Resolver, HostsBeyondTheLimitWaitForTheirTurn) {
  std::vector<std::string> hosts;
  for (size_t index = 0; index < 3 * kLookupCountMax; ++index) hosts.push_back("host" + std::to_string(index));
  HandLookup lookup(hosts);
  const auto resolver = Resolver::open(lookup.function()).value();
  for (const std::string& host : hosts) EXPECT_FALSE(resolver->try_resolve(host, clock_now()));
  for (const std::string& host : hosts) {
    EXPECT_LE(static_cast<size_t>(lookup.count()), kLookupCountMax + static_cast<size_t>(&host - hosts.data()));
    lookup.answer(host, HostAddress{.number = "10.0.0.1"});
    await(*resolver, host);
  }
  EXPECT_EQ(static_cast<size_t>(lookup.count()), hosts.size());
}

TEST(Resolver, AnswerIsKeptForAWhile) {
  HandLookup lookup({"node"});
  const auto resolver = Resolver::open(lookup.function()).value();
  lookup.answer("node", HostAddress{.number = "10.0.0.1"});
  EXPECT_FALSE(resolver->try_resolve("node", clock_now()));
  await(*resolver, "node");
  EXPECT_TRUE(resolver->try_resolve("node", clock_now()));
  EXPECT_EQ(lookup.count(), 1);
  EXPECT_FALSE(resolver->try_resolve("node", clock_now() + kAddressKept));
  await(*resolver, "node");
  EXPECT_EQ(lookup.count(), 2);
}

TEST(Resolver, FailureIsKeptForAShorterWhile) {
  HandLookup lookup({"node"});
  const auto resolver = Resolver::open(lookup.function()).value();
  lookup.answer("node", Fault{Errc::kFailed, "nobody knows it"});
  EXPECT_FALSE(resolver->try_resolve("node", clock_now()));
  await(*resolver, "node");
  EXPECT_FALSE(resolver->try_resolve("node", clock_now() + kFailureKept));
  await(*resolver, "node");
}

TEST(Resolver, LookupThatThrowsIsAFailure) {
  const auto resolver =
      Resolver::open([](const std::string&) -> Result<HostAddress> { throw std::runtime_error("no memory"); }).value();
  EXPECT_FALSE(resolver->try_resolve("node", clock_now()));
  await(*resolver, "node");
  EXPECT_EQ(resolver->try_resolve("node", clock_now())->error().message, "no memory");
}

// The program was ended by std::terminate, as by each exception that leaves a thread.
TEST(Resolver, LookupThatThrowsNoExceptionOfTheLibraryIsAFailure) {
  const auto resolver = Resolver::open([](const std::string&) -> Result<HostAddress> { throw 7; }).value();
  EXPECT_FALSE(resolver->try_resolve("node", clock_now()));
  await(*resolver, "node");
  EXPECT_EQ(resolver->try_resolve("node", clock_now())->error().message, "an exception that is not a std::exception");
}

// The same, as its thread made a place for the answer.
TEST(Resolver, AnswerIsNotedWhereTheThreadHasNoMemory) {
  const HostAddress address{.number = "2001:db8:1111:2222:3333:4444:5555:6666", .is_ipv6 = true};
  const std::string host = "a-worker-with-a-long-name.example";
  const auto resolver = Resolver::open([&address](const std::string&) {
                          Result<HostAddress> found(address);
                          test::is_memory_used_up = true;
                          return found;
                        }).value();
  EXPECT_FALSE(resolver->try_resolve(host, clock_now()));
  await(*resolver, host);
  EXPECT_EQ(resolver->try_resolve(host, clock_now())->value(), address);
}

TEST(Resolver, FailureIsNotedWhereTheThreadHasNoMemoryForItsWords) {
  const std::string host = "a-worker-with-a-long-name.example";
  const auto resolver = Resolver::open([](const std::string&) -> Result<HostAddress> {
                          const std::runtime_error failure("these words are more than fit a string without memory");
                          test::is_memory_used_up = true;
                          throw failure;
                        }).value();
  EXPECT_FALSE(resolver->try_resolve(host, clock_now()));
  await(*resolver, host);
  EXPECT_EQ(resolver->try_resolve(host, clock_now())->error().message, "no memory");
}

// An answer has the place that was made when its host was asked for.
TEST(Resolver, HostsBeyondTheLimitTakeNoPlaceOfOneThatIsAskedFor) {
  HandLookup lookup({"slow"});
  const auto resolver = Resolver::open([function = lookup.function()](const std::string& host) -> Result<HostAddress> {
                          if (host == "slow") return function(host);
                          return HostAddress{.number = "10.0.0.1"};
                        }).value();
  EXPECT_FALSE(resolver->try_resolve("slow", clock_now()));
  for (size_t index = 0; index < kKnownHostCountMax; ++index)
    EXPECT_FALSE(resolver->try_resolve("host" + std::to_string(index), clock_now()));
  for (size_t done_count = 0; done_count < kKnownHostCountMax;) {
    pollfd waited{.fd = resolver->fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&waited, 1, 30'000), 1);
    done_count += resolver->take_done().size();
  }
  EXPECT_FALSE(resolver->try_resolve("one more", clock_now()));
  await(*resolver, "one more");
  lookup.answer("slow", HostAddress{.number = "10.0.0.2"});
  await(*resolver, "slow");
  EXPECT_EQ(resolver->try_resolve("slow", clock_now())->value().number, "10.0.0.2");
}

TEST(Resolver, EndsWithoutWaitingForALookup) {
  HandLookup lookup({"slow"});
  auto resolver = Resolver::open(lookup.function()).value();
  EXPECT_FALSE(resolver->try_resolve("slow", clock_now()));
  resolver.reset();
  lookup.answer("slow", HostAddress{.number = "10.0.0.1"});
}

}  // namespace
}  // namespace penstock::net
