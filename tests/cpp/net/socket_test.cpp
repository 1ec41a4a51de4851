// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../base/child_process.h"
#include "pool_sockets.h"

namespace penstock::net {
namespace {

using std::chrono::seconds;

TEST(Readiness, WaitMarksTheDescriptorsThatAreReadable) {
  std::array<int, 2> first{};
  std::array<int, 2> second{};
  ASSERT_EQ(::pipe(first.data()), 0);
  ASSERT_EQ(::pipe(second.data()), 0);
  ASSERT_EQ(::write(second[1], "x", 1), 1);
  const std::array<int, 3> fds = {first[0], second[0], -1};
  std::array<bool, 3> is_readable = {true, false, true};
  ASSERT_TRUE(wait_readable({}, fds, is_readable, seconds(30)));
  EXPECT_EQ(is_readable, (std::array<bool, 3>{false, true, false}));
  for (const int fd : {first[0], first[1], second[0], second[1]}) ::close(fd);
}

TEST(Readiness, HangUpEndsAWait) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ::close(ends[1]);
  const std::array<int, 1> fds = {ends[0]};
  std::array<bool, 1> is_readable = {false};
  ASSERT_TRUE(wait_readable({}, fds, is_readable, seconds(30)));
  EXPECT_TRUE(is_readable[0]);
  ::close(ends[0]);
}

using std::chrono::milliseconds;

class ReadySetTest : public PoolSocketsTest {
 protected:
  // A client that is in the set, and how its server sends to it.
  struct Served {
    std::unique_ptr<ClientSocket> client;
    uint64_t tag = 0;
    std::string routing_id;
  };

  Served join(ServerSocket& server) {
    Served served;
    served.client = connect(server, Role::kTrainer);
    served.tag = set_->add(served.client->waitables()).value();
    EXPECT_TRUE(await_tag(served.tag)) << "it is told that the client is connected";
    EXPECT_TRUE(wait_and_send(*served.client, filled(1, 1)));
    const auto question = next_message(server);
    if (question) served.routing_id = question->peer.routing_id;
    set_->mark_used(served.tag);
    return served;
  }

  void leave(Served& served) {
    set_->remove(served.tag);
    served.client.reset();
  }

  // The tags that are told at once.
  std::set<uint64_t> told() { return of(set_->wait(milliseconds(0))); }
  // Waits until nothing is told: a connection that begins tells of itself more than once.
  void expect_calm() {
    const auto deadline = Clock::now() + kPatience;
    while (!of(set_->wait(milliseconds(20))).empty()) ASSERT_LT(Clock::now(), deadline);
  }
  bool await_tag(uint64_t tag) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline)
      if (of(set_->wait(kPatience)).contains(tag)) return true;
    return false;
  }
  static std::set<uint64_t> of(const Result<std::span<const uint64_t>>& tags) {
    EXPECT_TRUE(tags) << tags.error().message;
    return {tags.value().begin(), tags.value().end()};
  }
  static bool has_message(ClientSocket& client) {
    ClientReceipt receipt;
    return client.try_receive(receipt).value();
  }

  std::unique_ptr<ReadySet> set_ = ReadySet::open().value();
};

TEST_F(ReadySetTest, WaitEndsWhenNothingCame) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  Served served = join(*server);
  expect_calm();
  EXPECT_TRUE(of(set_->wait(milliseconds(1))).empty());
}

TEST_F(ReadySetTest, SocketThatIsAddedAfterSomethingCameIsTold) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  // To see that it waits takes up what the descriptor had to tell.
  ASSERT_TRUE(wait_readable(client->waitables(), {}, {}, kPatience));
  EXPECT_EQ(told(), std::set<uint64_t>{set_->add(client->waitables()).value()});
}

TEST_F(ReadySetTest, MessagesThatCameTogetherAreToldUntilTheLastIsReceived) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  Served served = join(*server);
  expect_calm();
  constexpr int kMessageCount = 50;
  for (int index = 0; index < kMessageCount; ++index) ASSERT_TRUE(server->send(served.routing_id, filled(10, index)));
  for (int index = 0; index < kMessageCount; ++index) {
    ASSERT_TRUE(await_tag(served.tag)) << index;
    ASSERT_TRUE(next_message(*served.client)) << index;
  }
  expect_calm();
  EXPECT_FALSE(has_message(*served.client));
}

TEST_F(ReadySetTest, MessageWhoseTellingASendTookUpIsToldOnceItsSocketIsStirred) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  Served served = join(*server);
  expect_calm();
  ASSERT_TRUE(server->send(served.routing_id, filled(1, 1)));
  ASSERT_TRUE(wait_readable(served.client->waitables(), {}, {}, kPatience));
  ASSERT_TRUE(served.client->send(filled(1, 2)));
  // This is what stirring is for: a message waits, and the descriptor says nothing.
  EXPECT_TRUE(told().empty());
  set_->mark_used(served.tag);
  EXPECT_EQ(told(), std::set<uint64_t>{served.tag});
  EXPECT_TRUE(has_message(*served.client));
}

TEST_F(ReadySetTest, MessageBehindOneThatWasReceivedIsToldWithoutStirring) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  Served served = join(*server);
  expect_calm();
  for (int index = 0; index < 2; ++index) ASSERT_TRUE(server->send(served.routing_id, filled(1, index)));
  ASSERT_TRUE(await_tag(served.tag));
  ASSERT_TRUE(next_message(*served.client));
  ASSERT_TRUE(wait_readable(served.client->waitables(), {}, {}, kPatience));
  ASSERT_TRUE(served.client->send(filled(1, 2)));
  EXPECT_EQ(told(), std::set<uint64_t>{served.tag});
}

TEST_F(ReadySetTest, SocketThatIsNeverServedHidesNoOther) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  std::vector<Served> served;
  for (int index = 0; index < 100; ++index) served.push_back(join(*server));  // more than the system tells in a call
  expect_calm();
  std::set<uint64_t> unserved;
  for (size_t index = 1; index < served.size(); ++index) {
    ASSERT_TRUE(server->send(served[index].routing_id, filled(1, 1)));
    ASSERT_TRUE(wait_readable(served[index].client->waitables(), {}, {}, kPatience));
    set_->mark_used(served[index].tag);
    unserved.insert(served[index].tag);
  }
  EXPECT_EQ(told(), unserved);
  ASSERT_TRUE(server->send(served[0].routing_id, filled(1, 1)));
  ASSERT_TRUE(await_tag(served[0].tag));
  EXPECT_TRUE(has_message(*served[0].client));
  EXPECT_EQ(told(), unserved);
}

TEST_F(ReadySetTest, EventsOfAConnectionAreTold) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  const Endpoint endpoint = server->endpoint();
  Served served = join(*server);
  for (int round = 0; round < 3; ++round) {
    expect_calm();
    server.reset();
    ASSERT_TRUE(await_tag(served.tag));
    auto event = served.client->try_event();
    while (!event && await_tag(served.tag)) event = served.client->try_event();
    EXPECT_EQ(event->kind, ConnectionEvent::Kind::kDisconnected);
    server = serve_again(endpoint);
    ASSERT_TRUE(server);
    event = served.client->try_event();
    while (!event && await_tag(served.tag)) event = served.client->try_event();
    EXPECT_EQ(event->kind, ConnectionEvent::Kind::kConnected);
  }
}

TEST_F(ReadySetTest, SocketsThatComeAndGoLeaveOthersAsTheyAre) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  Served stays = join(*server);
  std::set<uint64_t> gone;
  // The numbers of the descriptors that go are those of others that come.
  for (int round = 0; round < 30; ++round) {
    Served passes = join(*server);
    expect_calm();
    ASSERT_TRUE(server->send(passes.routing_id, filled(1, 1)));
    ASSERT_TRUE(await_tag(passes.tag));
    // Half of them go with a message unread, just after they were used.
    if (round % 2 == 0) {
      ASSERT_TRUE(next_message(*passes.client));
    }
    ASSERT_TRUE(passes.client->send(filled(1, 1)));
    set_->mark_used(passes.tag);
    ASSERT_TRUE(next_message(*server));
    leave(passes);
    gone.insert(passes.tag);
    ASSERT_TRUE(server->send(stays.routing_id, filled(1, 1)));
    for (bool is_told = false; !is_told;) {
      const auto tags = of(set_->wait(kPatience));
      ASSERT_FALSE(tags.empty());
      for (const uint64_t tag : tags) EXPECT_FALSE(gone.contains(tag));
      is_told = tags.contains(stays.tag);
    }
    ASSERT_TRUE(next_message(*stays.client));
  }
}

TEST_F(ReadySetTest, NumberOfADescriptorThatWasRemovedCanBeAnothers) {
  std::array<int, 2> first{};
  std::array<int, 2> second{};
  ASSERT_EQ(::pipe(first.data()), 0);
  const uint64_t first_tag = set_->add(first[0]).value();
  ASSERT_EQ(::write(first[1], "x", 1), 1);
  EXPECT_EQ(told(), std::set<uint64_t>{first_tag});
  EXPECT_EQ(told(), std::set<uint64_t>{first_tag}) << "it was not read";
  // As in a child that was forked: the pipe lives on when its descriptor is closed.
  const int copy = ::dup(first[0]);
  set_->remove(first_tag);
  ::close(first[0]);
  ASSERT_EQ(::pipe(second.data()), 0);
  ASSERT_EQ(second[0], first[0]);
  const uint64_t second_tag = set_->add(second[0]).value();
  EXPECT_NE(second_tag, first_tag);
  EXPECT_TRUE(told().empty());
  ASSERT_EQ(::write(second[1], "x", 1), 1);
  EXPECT_EQ(told(), std::set<uint64_t>{second_tag});
  set_->remove(first_tag);  // which is nothing's any more
  EXPECT_EQ(told(), std::set<uint64_t>{second_tag});
  for (const int fd : {copy, first[1], second[0], second[1]}) ::close(fd);
}

TEST_F(ReadySetTest, DescriptorThatCannotBeWaitedForIsRefused) {
  const auto refused = set_->add(-1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kNoMemory);
  EXPECT_TRUE(told().empty());
}

// Answers each message with as many as its first byte says, on a thread of its own.
class Echo {
 public:
  explicit Echo(std::unique_ptr<ServerSocket> server)
      : server_(std::move(server)), thread_([this](const std::stop_token& stop) { run(stop); }) {}

 private:
  void run(const std::stop_token& stop) {
    ServerReceipt receipt;
    while (!stop.stop_requested()) {
      while (server_->try_receive(receipt).value()) {
        const auto count = std::to_integer<int>(receipt.parts.front().bytes().front());
        const std::vector<std::byte> answer(1, std::byte{0});
        for (int index = 0; index < count; ++index) EXPECT_TRUE(server_->send(receipt.peer.routing_id, answer));
      }
      const Waitable waitables[] = {server_->waitable()};
      EXPECT_TRUE(wait_readable(waitables, {}, {}, milliseconds(10)));
    }
    server_.reset();  // on the thread that used it
  }

  std::unique_ptr<ServerSocket> server_;
  std::jthread thread_;
};

// A wait that ends without a tag although answers are owed has lost a wake-up.
TEST_F(ReadySetTest, NoMessageIsLostWhateverItMeets) {
  constexpr int kClientCount = 6;
  constexpr int kQuestionCount = 4000;
  constexpr size_t kMessagesPerTurn = 3;
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  std::vector<Served> served;
  for (int index = 0; index < kClientCount; ++index) served.push_back(join(*server));
  const Echo echo(std::move(server));
  std::mt19937 random(7);
  std::map<uint64_t, int> owed;
  int total_owed = 0;
  int requested_count = 0;
  const auto ask = [&] {
    Served& one = served[random() % kClientCount];
    const int count = static_cast<int>(random() % 4);
    ASSERT_TRUE(one.client->send(filled(1, count)));
    set_->mark_used(one.tag);
    owed[one.tag] += count;
    total_owed += count;
    ++requested_count;
  };
  while (requested_count < kQuestionCount || total_owed > 0) {
    for (size_t count = random() % 3; count > 0 && requested_count < kQuestionCount; --count) ask();
    while (total_owed == 0 && requested_count < kQuestionCount) ask();
    if (total_owed == 0) break;
    const auto tags = of(set_->wait(kPatience));
    ASSERT_FALSE(tags.empty()) << total_owed << " answers are owed";
    for (const Served& one : served) {
      if (!tags.contains(one.tag)) continue;
      for (size_t count = 0; count < kMessagesPerTurn && has_message(*one.client); ++count) {
        --owed[one.tag];
        --total_owed;
      }
    }
  }
  for (const auto& [tag, count] : owed) EXPECT_EQ(count, 0);
}

TEST_F(ReadySetTest, DescriptorIsToldWhenItCanBeWrittenToWhileThatIsWatched) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const FileDescriptor here(ends[0]);
  const FileDescriptor there(ends[1]);
  const uint64_t tag = set_->add(here.get()).value();
  EXPECT_TRUE(told().empty());
  ASSERT_TRUE(set_->watch_output(tag, true));
  EXPECT_EQ(told(), std::set<uint64_t>{tag});
  EXPECT_EQ(told(), std::set<uint64_t>{tag}) << "for as long as it can";
  ASSERT_TRUE(set_->watch_output(tag, false));
  EXPECT_TRUE(told().empty());
  ASSERT_EQ(::write(there.get(), "x", 1), 1);
  EXPECT_EQ(told(), std::set<uint64_t>{tag});
}

// libzmq ends a process that has no descriptors for its threads.
TEST(SocketContexts, WithoutRoomForDescriptorsThereIsAReasonAndNoAbort) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              int opened_count = 0;
              for (int room = 0; room <= 12; ++room) {
                test::leave_descriptors(room);
                const auto context = SocketContext::open();
                if (context) {
                  ++opened_count;
                } else if (context.error().code != Errc::kNoMemory ||
                           context.error().message.find("ulimit -n") == std::string::npos) {
                  return context.error().message;
                }
              }
              return opened_count > 0 && opened_count < 12 ? "" : std::to_string(opened_count) + " were opened";
            }),
            "");
}

}  // namespace
}  // namespace penstock::net
