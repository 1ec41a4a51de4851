// SPDX-License-Identifier: Apache-2.0
// Servers to which more strangers connect than there is room for. 1,500 connections that said nothing took every
// descriptor of a worker, so that its dataset's next open() failed, and the training ended.
#include "net/stranger_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "base/process.h"
#include "curve_by_hand.h"
#include "net/server_socket.h"
#include "pool_sockets.h"
#include "tcp_connection.h"

namespace penstock::net {
namespace {

using std::chrono::milliseconds;

constexpr ConnectionBudget::Address kAnn{1};
constexpr ConnectionBudget::Address kBen{2};
constexpr ConnectionBudget::Address kCho{3};
constexpr Instant kStart{};

class ConnectionBudgetTest : public testing::Test {
 protected:
  // Connections of an address, a millisecond after one another, numbered from `first`.
  void add(const ConnectionBudget::Address& address, int first, int count) {
    for (int id = first; id < first + count; ++id) budget_.add(id, address, now_ += milliseconds(1));
  }
  // Who is closed until there is room for all others.
  std::vector<int> closed() {
    std::vector<int> ids;
    while (const auto id = budget_.surplus()) {
      ids.push_back(*id);
      budget_.remove(*id);
    }
    return ids;
  }

  Instant now_ = kStart;
  ConnectionBudget budget_{{.stage_count_max = 8, .address_count_max = 4}};
};

TEST_F(ConnectionBudgetTest, ThereIsRoomForAllUpToTheLimits) {
  add(kAnn, 0, 4);
  add(kBen, 10, 4);
  EXPECT_EQ(budget_.surplus(), std::nullopt);
}

TEST_F(ConnectionBudgetTest, OldestOfAnAddressWithTooManyGoes) {
  add(kBen, 10, 1);
  add(kAnn, 0, 6);
  EXPECT_EQ(closed(), (std::vector{0, 1}));
}

TEST_F(ConnectionBudgetTest, FullestAddressGivesWayWhenAllIsFull) {
  add(kBen, 10, 3);
  add(kAnn, 0, 4);
  add(kCho, 20, 2);
  EXPECT_EQ(closed(), (std::vector{0}));
  add(kCho, 22, 1);  // now each has three, and Ben's first came first of all
  EXPECT_EQ(closed(), (std::vector{10}));
}

TEST_F(ConnectionBudgetTest, StrangersOfManyAddressesLeaveRoomForEachNewOne) {
  for (uint8_t number = 1; number <= 100; ++number) {
    budget_.add(number, {0, number}, now_ += milliseconds(1));
    const auto gone = closed();
    EXPECT_EQ(gone, number <= 8 ? std::vector<int>() : std::vector<int>{number - 8});
  }
}

TEST_F(ConnectionBudgetTest, StageHasRoomOfItsOwn) {
  add(kAnn, 0, 4);
  budget_.advance(0, HandshakeStage::kGreeting);
  budget_.advance(1, HandshakeStage::kKeyKnown);
  add(kAnn, 10, 40);
  const auto gone = closed();
  EXPECT_EQ(gone.size(), 38u);
  EXPECT_EQ(gone.front(), 2);
  EXPECT_EQ(budget_.stage_of(0), HandshakeStage::kGreeting);
  EXPECT_EQ(budget_.stage_of(1), HandshakeStage::kKeyKnown);
  EXPECT_EQ(budget_.stage_of(49), HandshakeStage::kSilent);
}

TEST_F(ConnectionBudgetTest, OneThatHasGoneOnIsLastInItsNewStage) {
  add(kAnn, 0, 5);
  for (const int id : {1, 2, 3, 4, 0}) budget_.advance(id, HandshakeStage::kGreeting);
  EXPECT_EQ(closed(), (std::vector{1}));
}

TEST_F(ConnectionBudgetTest, SilentOnesGoFirstWhereAnyMustGo) {
  EXPECT_EQ(budget_.first(), std::nullopt);
  add(kAnn, 0, 2);
  budget_.advance(0, HandshakeStage::kGreeting);
  EXPECT_EQ(budget_.first(), 1);
  budget_.remove(1);
  EXPECT_EQ(budget_.first(), 0);
  budget_.remove(0);
  EXPECT_TRUE(budget_.is_empty());
  EXPECT_FALSE(budget_.has(0));
}

TEST_F(ConnectionBudgetTest, EachStageHasATime) {
  for (const int id : {0, 1, 2}) budget_.add(id, kAnn, kStart);
  budget_.advance(1, HandshakeStage::kGreeting);
  budget_.advance(2, HandshakeStage::kKeyKnown);
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[0] - milliseconds(1)), std::vector<int>());
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[0]), (std::vector{0}));
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[1]), (std::vector{0, 1}));
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[2]), (std::vector{0, 1, 2}));
}

TEST_F(ConnectionBudgetTest, TimeIsHalvedWhileMostOfTheRoomIsTaken) {
  const Instant half = kStart + kStageTimes[0] / 2;
  for (const int id : {0, 1, 2, 3}) budget_.add(id, kAnn, kStart);
  for (const int id : {10, 11}) budget_.add(id, kBen, half);
  EXPECT_EQ(budget_.overdue(half), std::vector<int>());
  budget_.add(12, kBen, half);
  EXPECT_EQ(budget_.overdue(half), (std::vector{0, 1, 2, 3}));
}

TEST(ConnectionBudgetLimits, FollowFromTheDescriptorsOfTheProcess) {
  const auto limits = [](uint64_t descriptors, size_t sharer_count = 1) {
    const auto found = ConnectionBudget::limits_under(descriptors, sharer_count);
    return std::vector{found.stage_count_max, found.address_count_max};
  };
  EXPECT_EQ(limits(16), (std::vector<size_t>{4, 2}));
  EXPECT_EQ(limits(256), (std::vector<size_t>{16, 8}));
  EXPECT_EQ(limits(1024), (std::vector<size_t>{64, 32}));
  EXPECT_EQ(limits(4096), (std::vector<size_t>{128, 64}));
  EXPECT_EQ(limits(~uint64_t{0}), (std::vector<size_t>{128, 64}));
  EXPECT_EQ(limits(4096, 8), (std::vector<size_t>{32, 16})) << "each of eight workers has an eighth";
  EXPECT_EQ(limits(4096, 1024), (std::vector<size_t>{4, 2}));
}

constexpr HolderBudget::Address kHere{1};
constexpr HolderBudget::Address kThere{2};

class HolderBudgetTest : public testing::Test {
 protected:
  // Connections that are let in, numbered from `first`. Returns who is closed for them.
  std::vector<int> let_in(int first, int count, const HolderBudget::Address& address = kHere) {
    std::vector<int> closed;
    for (int id = first; id < first + count; ++id) {
      budget_.add(id, address);
      close_surplus(id, closed);
    }
    return closed;
  }
  // The same of ones that send a message as soon as they are let in.
  std::vector<int> speak(const std::string& key, int first, int count) {
    std::vector<int> closed;
    for (int id = first; id < first + count; ++id) {
      budget_.add(id, kHere);
      close_surplus(id, closed);
      budget_.speak(id, key);
      close_surplus(id, closed);
    }
    return closed;
  }
  void close_surplus(int id, std::vector<int>& closed) {
    while (const auto surplus = budget_.surplus(id)) {
      closed.push_back(*surplus);
      budget_.remove(*surplus);
    }
  }

  HolderBudget budget_{{.known_count_max = 12, .key_count_max = 6, .quiet_count_max = 4, .quiet_address_count_max = 3}};
};

TEST_F(HolderBudgetTest, ThereIsRoomForAllUpToTheLimits) {
  EXPECT_EQ(speak("ann", 0, 6), std::vector<int>());
  EXPECT_EQ(speak("ben", 10, 6), std::vector<int>());
  EXPECT_EQ(let_in(20, 3), std::vector<int>());
  EXPECT_EQ(let_in(30, 1, kThere), std::vector<int>());
  EXPECT_EQ(budget_.count(), 16u);
}

TEST_F(HolderBudgetTest, KeyWithTooManyLosesItsOldest) {
  speak("ben", 0, 1);
  EXPECT_EQ(speak("mallory", 10, 8), (std::vector{10, 11}));
  EXPECT_TRUE(budget_.has(0));
}

TEST_F(HolderBudgetTest, KeyWithMostGivesWayWhenAllIsFull) {
  speak("ann", 0, 4);
  speak("mallory", 10, 6);
  EXPECT_EQ(speak("ben", 20, 4), (std::vector{10, 11}));
  EXPECT_EQ(speak("cho", 30, 1), (std::vector{0})) << "each has four, and this one came first of all";
}

TEST_F(HolderBudgetTest, ThatHasSentNothingCountsForItsAddress) {
  speak("ann", 0, 1);
  EXPECT_EQ(let_in(10, 5), (std::vector{10, 11}));
  EXPECT_EQ(let_in(20, 2, kThere), (std::vector{12})) << "the fullest address gives way";
  EXPECT_TRUE(budget_.has(0));
}

TEST_F(HolderBudgetTest, ThoseThatSendNothingFromManyAddressesCloseNoneThatHas) {
  EXPECT_EQ(speak("ann", 0, 6), std::vector<int>());
  EXPECT_EQ(speak("ben", 10, 6), std::vector<int>());
  for (uint8_t number = 1; number <= 100; ++number)
    EXPECT_EQ(let_in(100 + number, 1, {0, number}),
              number <= 4 ? std::vector<int>() : std::vector<int>{100 + number - 4});
}

TEST_F(HolderBudgetTest, ConnectionKeepsItsAgeWhenItSpeaks) {
  let_in(0, 1);
  speak("ann", 10, 5);
  budget_.speak(0, "ann");
  EXPECT_EQ(speak("ann", 20, 1), (std::vector{0}));
}

TEST_F(HolderBudgetTest, ThatSpeaksAgainIsOfTheKeyThatItSpokeWithLast) {
  speak("ann", 0, 5);
  speak("ben", 10, 1);
  budget_.speak(10, "ann");
  EXPECT_EQ(speak("ann", 20, 1), (std::vector{0}));
}

TEST_F(HolderBudgetTest, KeyWithOneConnectionIsNeverClosedHoweverManyAnotherHas) {
  speak("ann", 0, 1);
  for (int first = 10; first < 5010; first += 10) {
    speak("mallory", first, 5);
    let_in(first + 5, 5);
  }
  EXPECT_TRUE(budget_.has(0));
  EXPECT_LE(budget_.count(), 16u);
}

TEST(HolderRoom, FollowsFromTheDescriptorsThatAProcessMayHave) {
  const HolderRoom room{.count_max = 1000, .descriptors_for_each = 8};
  const auto count_under = [&room](uint64_t descriptor_limit) {
    const auto limits = HolderBudget::limits_under(descriptor_limit, room);
    return limits.known_count_max + limits.quiet_count_max;
  };
  EXPECT_EQ(count_under(1024), 128u);
  EXPECT_EQ(count_under(20), kHoldersMin);
  const auto limits = HolderBudget::limits_under(uint64_t{1} << 20, room);
  EXPECT_EQ(limits.known_count_max, 750u);
  EXPECT_EQ(limits.key_count_max, 375u);
  EXPECT_EQ(limits.quiet_count_max, 250u);
  EXPECT_EQ(limits.quiet_address_count_max, 125u);
}

using std::chrono::seconds;
using test::Bytes;
using test::bytes_of;
using test::CurveByHand;
using test::TcpConnection;

constexpr milliseconds kVeryLong = seconds(300);  // libzmq's own limit, so that it does not do the guard's work

// The limits of servers of this process.
ConnectionBudget::Limits limits_here() { return ConnectionBudget::limits_under(descriptor_limit()); }

// What a greeting begins with. The system passes a connection on to the server once it has this.
const Bytes kFirstByte = {std::byte{0xff}};

// A stranger's connection that says this and no more.
std::unique_ptr<TcpConnection> begun(uint16_t port, uint32_t source = INADDR_LOOPBACK) {
  auto connection = std::make_unique<TcpConnection>(port, source);
  static_cast<void>(connection->try_send(kFirstByte));
  return connection;
}

// Where the system does not, silent connections are the server's at once.
bool keeps_silent_connections() {
  int mode = 0;
  return std::ifstream("/proc/sys/net/ipv4/tcp_syncookies") >> mode && mode == 1;
}

uint32_t loopback(uint32_t number) { return (uint32_t{127} << 24) + number; }

// Connections of a stranger, each of which is made anew as soon as it is found closed, on a thread.
class Crowd {
 public:
  struct Options {
    size_t count;
    Bytes opening = kFirstByte;  // what each begins with, and nothing after it
    std::vector<uint32_t> sources = {INADDR_LOOPBACK};
    milliseconds pause = milliseconds(1);  // between two looks at all of them
  };
  Crowd(uint16_t port, Options options) : port_(port), options_(std::move(options)) {
    while (connections_.size() < options_.count) connect();
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) renew();
    });
  }

  // How many were closed so far.
  size_t closed_count() const { return closed_count_; }
  // Waits until so many more were.
  void wait_closed(size_t count) const {
    const size_t aim = closed_count_ + count;
    const auto deadline = std::chrono::steady_clock::now() + seconds(60);
    while (closed_count_ < aim) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << closed_count_ << " of " << aim << " were closed";
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

 private:
  void connect() {
    const uint32_t source = options_.sources[next_source_++ % options_.sources.size()];
    auto& connection = connections_.emplace_back(std::make_unique<TcpConnection>(port_, source));
    static_cast<void>(connection->try_send(options_.opening));
    // 20 in a millisecond at most, so that a server that has to wait for a CPU is not tested for that.
    if (next_source_ % 20 == 0) std::this_thread::sleep_for(milliseconds(1));
  }
  void renew() {
    closed_count_ += std::erase_if(connections_, [](const auto& connection) { return connection->is_closed(); });
    while (connections_.size() < options_.count) connect();
    std::this_thread::sleep_for(options_.pause);
  }

  const uint16_t port_;
  const Options options_;
  std::vector<std::unique_ptr<TcpConnection>> connections_;
  size_t next_source_ = 0;
  std::atomic<size_t> closed_count_ = 0;
  std::jthread thread_;
};

// A server in a process of its own that may have few files open. It opens some all the while, as a dataset does, and
// answers each message with itself. Told to hoard, it takes every descriptor that is left, and gives them back when
// told to. It is forked before this process has a thread.
class ServerProcess {
 protected:
  static constexpr rlim_t kFilesMax = 256;
  static constexpr size_t kFilesOfDataset = 16;
  static inline const Bytes kHoard = bytes_of("hoard");
  static inline const Bytes kGiveBack = bytes_of("give back");

  ServerProcess() {
    EXPECT_EQ(::pipe2(port_ends_.data(), O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(stop_ends_.data(), O_CLOEXEC), 0);
    child_.emplace([this] { return serve(); });
    ::close(port_ends_[1]);
    ::close(stop_ends_[0]);
    EXPECT_EQ(::read(port_ends_[0], &port_, sizeof port_), static_cast<ssize_t>(sizeof port_));
  }
  ~ServerProcess() {
    static_cast<void>(stop_server());
    ::close(port_ends_[0]);
  }

  uint16_t port() const { return port_; }
  Endpoint endpoint() const { return {.host = "127.0.0.1", .port = port_}; }

  // Ends it. Returns why it had ended before, or what it could not do; empty if all was well.
  std::string stop_server() {
    if (stop_ends_[1] >= 0) ::close(std::exchange(stop_ends_[1], -1));
    return child_->join();
  }

  const PoolKeys server_keys_;
  const KeyPair users_ = KeyPair::generate();  // of a user beside those with the key of trainers

 private:
  static std::vector<FileDescriptor> open_files(size_t count_max) {
    std::vector<FileDescriptor> files;
    while (files.size() < count_max) {
      FileDescriptor file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!file) break;
      files.push_back(std::move(file));
    }
    return files;
  }

  std::string serve() {
    ::close(stop_ends_[1]);
    const rlimit limit{.rlim_cur = kFilesMax, .rlim_max = kFilesMax};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return "the limit could not be set";
    const auto context = SocketContext::open();
    if (!context) return context.error().message;
    const auto authenticator = Authenticator::start(*context.value());
    if (!authenticator) return authenticator.error().message;
    const auto server =
        ServerSocket::bind(*context.value(), *authenticator.value(), {.host = "127.0.0.1", .port = 0},
                           server_keys_.ring(Role::kController, KeyOrigin::kGiven, {{users_.public_key(), "mallory"}}),
                           {.allowed_roles = {Role::kTrainer}, .handshake_interval = kVeryLong});
    if (!server) return server.error().message;
    const uint16_t port = server.value()->endpoint().port;
    if (::write(port_ends_[1], &port, sizeof port) != static_cast<ssize_t>(sizeof port)) return "nobody asks the port";
    std::optional<std::vector<FileDescriptor>> hoard;
    ServerReceipt receipt;
    const std::array<int, 1> fds{stop_ends_[0]};
    std::array<bool, 1> is_to_end{};
    while (!is_to_end[0]) {
      if (!hoard && open_files(kFilesOfDataset).size() < kFilesOfDataset)
        return std::string("a file could not be opened: ") + std::strerror(errno);
      for (;;) {
        const auto received = server.value()->try_receive(receipt);
        if (!received) return received.error().message;
        if (!received.value()) break;
        const auto said = receipt.parts.at(0).bytes();
        const Bytes message(said.begin(), said.end());
        if (message == kHoard) hoard = open_files(kFilesMax);
        if (message == kGiveBack) hoard.reset();
        const auto sent = server.value()->send(receipt.peer.routing_id, message);
        if (!sent && sent.error().code != Errc::kClosed) return "an answer could not be sent: " + sent.error().message;
      }
      const Waitable waitables[] = {server.value()->waitable()};
      if (auto waited = wait_readable(waitables, fds, is_to_end, milliseconds(5)); !waited)
        return waited.error().message;
    }
    return {};
  }

  std::array<int, 2> port_ends_{};
  std::array<int, 2> stop_ends_{};
  uint16_t port_ = 0;
  std::optional<test::ChildProcess> child_;
};

// The base that forks comes first.
class ServerWithFewDescriptors : protected ServerProcess, public PoolSocketsTest {
 protected:
  ServerWithFewDescriptors() {
    const rlimit raised{.rlim_cur = limit_.rlim_max, .rlim_max = limit_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &raised), 0);  // for those who connect
  }
  ~ServerWithFewDescriptors() override { ::setrlimit(RLIMIT_NOFILE, &limit_); }

  // A client that is connected. One that is closed to make room for others connects again.
  std::unique_ptr<ClientSocket> connected() {
    auto client = connect(endpoint(), server_keys_.pair(Role::kTrainer), server_keys_.public_key(Role::kController));
    std::optional<ConnectionEvent> event;
    do {
      event = next_event(*client);
    } while (event && event->kind == ConnectionEvent::Kind::kRefused && !event->is_final);
    EXPECT_TRUE(event && event->kind == ConnectionEvent::Kind::kConnected) << (event ? event->reason : "no event");
    return client;
  }
  // Returns once the guard has set up the port, which it does before it looks at connections.
  void expect_guarded() {
    std::vector<std::unique_ptr<TcpConnection>> strangers;
    const size_t room = ConnectionBudget::limits_under(kFilesMax).address_count_max;
    while (strangers.size() <= room) strangers.push_back(begun(port()));
    EXPECT_TRUE(strangers.front()->wait_closed());
  }
  static void expect_answered(ClientSocket& client, const Bytes& message) {
    ASSERT_TRUE(client.send(message));
    const auto answer = next_message(client);
    ASSERT_TRUE(answer);
    EXPECT_EQ(copy_of(answer->parts.at(0)), message);
  }

  rlim_t own_files_max() const { return limit_.rlim_max; }

 private:
  static rlimit limit_now() {
    rlimit limit{};
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit;
  }

  const rlimit limit_ = limit_now();
};

// Each round is of more connections than the server has descriptors. So few of them are there at once that it has room
// for those that its guard, waiting for a CPU, has not looked at.
TEST_F(ServerWithFewDescriptors, ServesAndOpensFilesWhileMoreThanItHasConnectAndSayLittle) {
  const auto first = connected();
  {
    const Crowd crowd(port(), {.count = kFilesMax / 2});
    for (int round = 0; round < 10; ++round) {
      crowd.wait_closed(500);
      expect_answered(*first, filled(1000, round));
      expect_answered(*connected(), filled(1000, round));
    }
  }
  EXPECT_FALSE(first->try_event()) << "it was disconnected";
  expect_answered(*first, filled(1, 1));
  EXPECT_EQ(stop_server(), "");
}

// They took two descriptors each, and were made again as fast as they were closed, which cost a job 13 % of its rate.
TEST_F(ServerWithFewDescriptors, SilentConnectionsAreLeftToTheSystem) {
  if (!keeps_silent_connections()) GTEST_SKIP() << "this system has no SYN cookies";
  expect_guarded();
  const auto first = connected();
  std::vector<std::unique_ptr<TcpConnection>> silent;
  while (silent.size() < 4 * kFilesMax) {
    silent.push_back(std::make_unique<TcpConnection>(port()));
    if (silent.size() % kFilesMax == 0) expect_answered(*connected(), filled(1000, 1));
  }
  expect_answered(*first, filled(1000, 2));
  for (const auto& connection : silent) ASSERT_FALSE(connection->is_closed());
  // It is the server's once it speaks.
  ASSERT_TRUE(silent.front()->try_send(kFirstByte));
  EXPECT_EQ(silent.front()->receive(10).size(), 10u);
  EXPECT_EQ(stop_server(), "");
}

TEST_F(ServerWithFewDescriptors, ServesAndOpensFilesWhileMoreSayNothingThanTheSystemKeeps) {
  constexpr size_t kMoreThanKept = 5000;
  if (own_files_max() < kMoreThanKept + 500) GTEST_SKIP() << "the test needs " << kMoreThanKept << " descriptors";
  expect_guarded();
  const auto first = connected();
  {
    std::vector<std::unique_ptr<TcpConnection>> silent;
    while (silent.size() < kMoreThanKept) {
      silent.push_back(std::make_unique<TcpConnection>(port()));
      if (silent.size() % 20 == 0) std::this_thread::sleep_for(milliseconds(1));  // as Crowd does
      if (silent.size() % 500 == 0) expect_answered(*connected(), filled(1000, 1));
    }
  }
  EXPECT_FALSE(first->try_event()) << "it was disconnected";
  expect_answered(*first, filled(1, 1));
  EXPECT_EQ(stop_server(), "");
}

TEST_F(ServerWithFewDescriptors, ServesAndOpensFilesWhileHandshakesAreBegunAndNotEnded) {
  const auto first = connected();
  {
    const Crowd crowd(port(), {.count = 100, .opening = test::greeting("CURVE"), .pause = milliseconds(100)});
    for (int round = 0; round < 10; ++round) {
      crowd.wait_closed(100);
      expect_answered(*first, filled(1000, round));
      expect_answered(*connected(), filled(1000, round));
    }
  }
  EXPECT_FALSE(first->try_event()) << "it was disconnected";
  EXPECT_EQ(stop_server(), "");
}

// libzmq accepted nobody, and tried for ever.
TEST_F(ServerWithFewDescriptors, TurnsAwayWhoeverConnectsWhenNoneIsLeftAndServesAgainLater) {
  const auto first = connected();
  expect_answered(*first, kHoard);
  std::vector<std::unique_ptr<TcpConnection>> strangers;
  for (int count = 0; count < 20; ++count) strangers.push_back(begun(port()));
  for (const auto& stranger : strangers) EXPECT_TRUE(stranger->wait_closed());
  expect_answered(*first, filled(10, 2));
  expect_answered(*first, kGiveBack);
  expect_answered(*connected(), filled(10, 1));
  EXPECT_FALSE(first->try_event()) << "it was disconnected";
  EXPECT_EQ(stop_server(), "");
}

// Whoever has a key took every descriptor, and nobody else could connect.
TEST_F(ServerWithFewDescriptors, ServesOthersWhileOneKeyHasMoreConnectionsThanItHasDescriptors) {
  const auto first = connected();
  expect_answered(*first, filled(1000, 0));
  const size_t room = HolderBudget::limits_under(kFilesMax, {}).known_count_max;
  for (const bool is_speaking : {false, true, false}) {
    std::vector<std::unique_ptr<CurveByHand>> crowd;
    for (size_t count = 0; count < 2 * kFilesMax; ++count) {
      crowd.push_back(
          std::make_unique<CurveByHand>(port(), users_, server_keys_.public_key(Role::kController), INADDR_LOOPBACK));
      const bool is_in = crowd.back()->try_shake_hands();
      EXPECT_TRUE(is_in) << count;
      if (is_in && is_speaking) crowd.back()->connection().try_send(crowd.back()->part(bytes_of("here"), false));
      if (count % 100 == 0) expect_answered(*connected(), filled(1000, 1));
    }
    for (size_t index = 0; index + room < crowd.size(); ++index)
      ASSERT_TRUE(crowd[index]->connection().wait_closed()) << index << ", speaking: " << is_speaking;
    expect_answered(*connected(), filled(1000, 2));
    expect_answered(*first, filled(1000, 3));
  }
  EXPECT_FALSE(first->try_event()) << "it was disconnected";
  expect_answered(*connected(), filled(1000, 4));
  EXPECT_EQ(stop_server(), "");
}

class StrangerGuardTest : public PoolSocketsTest {
 protected:
  // Serves until all that these clients said has been answered.
  void expect_answered(const std::vector<std::unique_ptr<ClientSocket>>& clients) {
    for (const auto& client : clients) {
      ASSERT_FALSE(client->try_event()) << "it was disconnected";
      ASSERT_TRUE(client->send(filled(100, 3)));
      const auto question = next_message(*server_);
      ASSERT_TRUE(question);
      ASSERT_TRUE(server_->send(question->peer.routing_id, filled(10, 4)));
      ASSERT_TRUE(next_message(*client));
    }
  }
  static size_t own_descriptor_count() {
    size_t count = 0;
    for (int fd = 0; fd < 65'536; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
  }

  uint16_t port() const { return server_->endpoint().port; }

  const std::unique_ptr<ServerSocket> server_ =
      serve({.allowed_roles = {Role::kTrainer}, .handshake_interval = kVeryLong});
};

TEST_F(StrangerGuardTest, ClientsWithAKeyAreNeverClosedForStrangers) {
  std::vector<std::unique_ptr<ClientSocket>> clients;
  for (int index = 0; index < 8; ++index) {
    clients.push_back(connect(*server_, Role::kTrainer));
    expect_connected(*clients.back());
  }
  const size_t count = 2 * limits_here().stage_count_max;
  for (const Bytes& opening : {kFirstByte, test::greeting("CURVE")}) {
    const Crowd crowd(port(), {.count = count, .opening = opening, .sources = {loopback(1), loopback(2)}});
    crowd.wait_closed(2000);
    expect_answered(clients);
  }
}

TEST_F(StrangerGuardTest, FullestAddressLosesItsOldestAndOthersNone) {
  const auto other = begun(port(), loopback(2));
  constexpr size_t kSurplus = 20;
  std::vector<std::unique_ptr<TcpConnection>> fullest;
  for (size_t count = 0; count < limits_here().address_count_max + kSurplus; ++count)
    fullest.push_back(begun(port(), loopback(3)));
  for (size_t index = 0; index < kSurplus; ++index) ASSERT_TRUE(fullest[index]->wait_closed()) << index;
  EXPECT_FALSE(other->is_closed());
  EXPECT_FALSE(fullest.back()->is_closed());
}

TEST_F(StrangerGuardTest, PeerAtAnotherAddressThanTheStrangersIsLetInAtItsFirstTry) {
  const Crowd crowd(port(), {.count = 2 * limits_here().stage_count_max,
                             .opening = test::greeting("CURVE"),
                             .sources = {loopback(3), loopback(4)},
                             .pause = milliseconds(10)});
  for (int round = 0; round < 10; ++round) {
    crowd.wait_closed(100);
    CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController), loopback(5));
    EXPECT_TRUE(peer.try_shake_hands());
  }
}

TEST_F(StrangerGuardTest, ConnectionThatStopsInItsHandshakeIsClosed) {
  const auto begins = begun(port());
  TcpConnection greeting(port());
  ASSERT_TRUE(greeting.try_send(test::greeting("CURVE")));
  EXPECT_TRUE(begins->wait_closed());
  EXPECT_TRUE(greeting.wait_closed());
  expect_served(*server_);
}

TEST_F(StrangerGuardTest, StrangersOfAPortForBatchesAreBounded) {
  const auto server = DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0}, {}, [] {}).value();
  std::vector<std::unique_ptr<TcpConnection>> idle;
  constexpr size_t kSurplus = 20;
  for (size_t count = 0; count < limits_here().address_count_max + kSurplus; ++count)
    idle.push_back(begun(server->endpoint().port));
  for (size_t index = 0; index < kSurplus; ++index) EXPECT_TRUE(idle[index]->wait_closed()) << index;
  EXPECT_FALSE(idle.back()->is_closed());
}

TEST_F(StrangerGuardTest, ServersOfOneProcessShareTheRoom) {
  const size_t sharers = descriptor_limit() / (kDescriptorsForEach * kStageConnectionsMin);
  const auto server =
      serve({.allowed_roles = {Role::kTrainer}, .handshake_interval = kVeryLong, .sharer_count = sharers});
  const auto data =
      DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0}, {.sharer_count = sharers}, [] {
      }).value();
  constexpr size_t room = kStageConnectionsMin / kAddressPart;
  ASSERT_LT(room, limits_here().address_count_max);
  for (const uint16_t port : {server->endpoint().port, data->endpoint().port}) {
    std::vector<std::unique_ptr<TcpConnection>> idle;
    idle.push_back(begun(port));
    EXPECT_EQ(idle.front()->receive(10).size(), 10u);  // before that the guard cannot see that bytes are counted
    while (idle.size() <= room) idle.push_back(begun(port));
    EXPECT_TRUE(idle.front()->wait_closed());
  }
}

TEST_F(StrangerGuardTest, NothingIsKeptOfStrangersWhoHaveGone) {
  expect_served(*server_);
  const size_t before = own_descriptor_count();
  {
    const Crowd crowd(port(), {.count = 2 * limits_here().stage_count_max});
    crowd.wait_closed(2000);
  }
  const auto deadline = Clock::now() + kPatience;
  size_t after = own_descriptor_count();
  while (after > before && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
    after = own_descriptor_count();
  }
  EXPECT_LE(after, before);
}

TEST_F(StrangerGuardTest, PortIsFreeOnceItsServerHasGone) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  const Endpoint endpoint = server->endpoint();
  const TcpConnection silent(endpoint.port);
  const auto stranger = begun(endpoint.port);
  server.reset();
  EXPECT_TRUE(stranger->wait_closed());
  EXPECT_TRUE(serve_again(endpoint));
}

}  // namespace
}  // namespace penstock::net
