// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"
#include "base/identity.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../base/child_process.h"

namespace penstock::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Bytes = std::vector<std::byte>;

class SocketTest : public testing::Test {
 protected:
  void open() {
    trainer_ = Socket::bind(context_, name_).value();
    worker_ = Socket::connect(context_, name_).value();
    ASSERT_TRUE(worker_->wait_writable(seconds(30)));
  }

  static Result<void> send(Socket& socket, const std::vector<Bytes>& parts) {
    const std::vector<std::span<const std::byte>> views(parts.begin(), parts.end());
    return socket.send(views);
  }

  // Waits for the next message and returns its parts.
  static MessageParts receive(Socket& socket) {
    MessageParts parts;
    Socket* const sockets[] = {&socket};
    for (;;) {
      const auto received = socket.try_receive(parts);
      if (!received || received.value()) return parts;
      if (!Socket::wait(sockets, {}, {}, seconds(30))) return {};
    }
  }

  static Bytes filled(size_t size, int value) { return Bytes(size, static_cast<std::byte>(value)); }

  const std::string name_ = make_endpoint_name();
  SocketContext context_;
  std::unique_ptr<Socket> trainer_;
  std::unique_ptr<Socket> worker_;
};

TEST_F(SocketTest, MessagesOfSeveralPartsComeBothWaysWithTheirParts) {
  open();
  const std::vector<Bytes> there = {filled(64, 1), {}, filled(3'000'000, 2)};
  const std::vector<Bytes> back = {filled(1, 3)};
  ASSERT_TRUE(send(*worker_, there));
  EXPECT_EQ(receive(*trainer_), there);
  ASSERT_TRUE(send(*trainer_, back));
  EXPECT_EQ(receive(*worker_), back);
}

TEST_F(SocketTest, BuffersThatAreUsedAgainHoldOnlyTheNewMessage) {
  open();
  ASSERT_TRUE(send(*worker_, {filled(100, 1), filled(50, 2)}));
  ASSERT_TRUE(send(*worker_, {filled(10, 3)}));
  MessageParts parts = receive(*trainer_);
  ASSERT_EQ(parts.size(), 2u);
  Socket* const sockets[] = {trainer_.get()};
  ASSERT_TRUE(Socket::wait(sockets, {}, {}, seconds(30)));
  ASSERT_TRUE(trainer_->try_receive(parts).value());
  EXPECT_EQ(parts, MessageParts{filled(10, 3)});
}

TEST_F(SocketTest, ThousandsOfMessagesAreNeitherDroppedNorReordered) {
  open();
  for (int index = 0; index < 5000; ++index) ASSERT_TRUE(worker_->send(std::as_bytes(std::span(&index, 1))));
  for (int index = 0; index < 5000; ++index) {
    const auto parts = receive(*trainer_);
    ASSERT_EQ(parts, MessageParts{Bytes(std::as_bytes(std::span(&index, 1)).begin(),
                                        std::as_bytes(std::span(&index, 1)).end())});
  }
}

TEST_F(SocketTest, SendingWithoutAPeerIsClosed) {
  trainer_ = Socket::bind(context_, name_).value();
  EXPECT_EQ(trainer_->send(filled(1, 1)).error().code, Errc::kClosed);
  worker_ = Socket::connect(context_, make_endpoint_name()).value();
  ASSERT_TRUE(worker_->wait_writable(milliseconds(5)));
  EXPECT_EQ(worker_->send(filled(1, 1)).error().code, Errc::kClosed);
}

// A worker connected again to the name of a trainer that had died, which anybody on the machine may have bound by then,
// and took requests from there.
TEST_F(SocketTest, ConnectionThatHasEndedIsNotMadeAgainWithWhoeverHasTheName) {
  open();
  trainer_.reset();
  while (worker_->has_peer()) {
  }
  std::unique_ptr<Socket> stranger;
  while (!stranger) {  // the context's thread lets the name go
    if (auto bound = Socket::bind(context_, name_)) stranger = std::move(bound).value();
  }
  const auto own = Socket::connect(context_, name_).value();
  ASSERT_TRUE(own->wait_writable(seconds(30)));  // whoever connects to the name now is let in
  const int value = 7;
  ASSERT_TRUE(own->send(std::as_bytes(std::span(&value, 1))));
  EXPECT_EQ(receive(*stranger).size(), 1u);
  ASSERT_TRUE(worker_->wait_writable(milliseconds(200)));
  EXPECT_FALSE(worker_->has_peer());
  EXPECT_EQ(worker_->send(filled(1, 9)).error().code, Errc::kClosed);
}

TEST_F(SocketTest, TryReceiveWithoutAMessageIsFalse) {
  open();
  MessageParts parts;
  EXPECT_FALSE(trainer_->try_receive(parts).value());
}

TEST_F(SocketTest, BindingANameTwiceIsAnError) {
  open();
  EXPECT_FALSE(Socket::bind(context_, name_));
}

TEST_F(SocketTest, WaitingTellsWhichDescriptorsAreReadable) {
  open();
  std::array<int, 2> first{};
  std::array<int, 2> second{};
  ASSERT_EQ(::pipe(first.data()), 0);
  ASSERT_EQ(::pipe(second.data()), 0);
  ASSERT_EQ(::write(second[1], "x", 1), 1);
  const std::array<int, 3> fds = {first[0], second[0], -1};
  std::array<bool, 3> is_readable = {true, false, true};
  Socket* const sockets[] = {trainer_.get()};
  ASSERT_TRUE(Socket::wait(sockets, fds, is_readable, seconds(30)));
  EXPECT_EQ(is_readable, (std::array<bool, 3>{false, true, false}));
  for (const int fd : {first[0], first[1], second[0], second[1]}) ::close(fd);
}

TEST_F(SocketTest, AHangUpWakesAWaitForDescriptors) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ::close(ends[1]);
  const std::array<int, 1> fds = {ends[0]};
  std::array<bool, 1> is_readable = {false};
  ASSERT_TRUE(Socket::wait({}, fds, is_readable, seconds(30)));
  EXPECT_TRUE(is_readable[0]);
  ::close(ends[0]);
}

// libzmq ends a process that has no descriptors for its threads.
TEST(SocketContexts, WithoutRoomForDescriptorsThereIsAReasonAndNoAbort) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              const int next_fd = ::dup(STDOUT_FILENO);
              ::close(next_fd);
              int opened_count = 0;
              for (int room = 0; room <= 12; ++room) {
                const auto count = static_cast<rlim_t>(next_fd + room);
                const rlimit limit{.rlim_cur = count, .rlim_max = 4096};
                if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return "the limit could not be set";
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

// Connects to `name` in this process and tells whether a message could be sent.
std::string connect_and_send(const std::string& name, milliseconds patience) {
  SocketContext context;
  const auto socket = Socket::connect(context, name).value();
  static_cast<void>(socket->wait_writable(patience));
  const std::byte byte{1};
  const auto sent = socket->send({&byte, 1});
  return sent ? "sent" : std::string(errc_name(sent.error().code));
}

// The context of the trainer is made after the fork, as everywhere else.
class SocketUsers : public testing::Test {
 protected:
  std::string send_from_child(uid_t user, milliseconds patience) {
    const std::string name = make_endpoint_name();
    test::Gate bound;
    test::ChildProcess child([&]() -> std::string {
      bound.pass();
      if (::setgid(user) != 0 || ::setuid(user) != 0) return "the user could not be changed";
      return connect_and_send(name, patience);
    });
    SocketContext context;
    const auto trainer = Socket::bind(context, name).value();
    bound.open();
    return child.join();
  }
};

TEST_F(SocketUsers, AProcessOfTheSameUserIsLetIn) { EXPECT_EQ(send_from_child(::geteuid(), seconds(30)), "sent"); }

TEST_F(SocketUsers, AProcessOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  EXPECT_EQ(send_from_child(65534, milliseconds(300)), "closed");
}

}  // namespace
}  // namespace penstock::net
