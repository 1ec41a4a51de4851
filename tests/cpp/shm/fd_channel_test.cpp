// SPDX-License-Identifier: Apache-2.0
#include "shm/fd_channel.h"
#include "base/identity.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "../base/child_process.h"

namespace penstock::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::steady_clock;

constexpr uid_t kAnotherUser = 65534;

class FdChannel : public testing::Test {
 protected:
  FdChannel() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    here_.emplace(FileDescriptor(ends[0]));
    there_.emplace(FileDescriptor(ends[1]));
  }

  static steady_clock::time_point soon() { return steady_clock::now() + minutes(1); }
  Errc refusal() { return here_->receive(soon()).error().code; }

  // Sends bytes and descriptors as no well-behaved peer does.
  void send_raw(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
    alignas(cmsghdr) std::array<char, 256> control{};
    msghdr head{};
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    if (!fds.empty()) {
      head.msg_control = control.data();
      head.msg_controllen = CMSG_SPACE(fds.size_bytes());
      cmsghdr* rights = CMSG_FIRSTHDR(&head);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
    }
    ASSERT_EQ(::sendmsg(there_->fd(), &head, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  static std::vector<std::byte> message_bytes(const FdMessage& message, size_t more = 0) {
    std::vector<std::byte> bytes(sizeof message + more);
    std::memcpy(bytes.data(), &message, sizeof message);
    return bytes;
  }

  static size_t open_fd_count() {
    size_t count = 0;
    DIR* folder = ::opendir("/proc/self/fd");
    while (::readdir(folder) != nullptr) ++count;
    ::closedir(folder);
    return count;
  }

  std::optional<FdConnection> here_;
  std::optional<FdConnection> there_;
};

// The refusal of a process of another user. Runs in a child, as root may take any user.
std::string as_another_user(const std::function<std::string()>& body) {
  if (::setgid(kAnotherUser) != 0 || ::setuid(kAnotherUser) != 0) return "the user could not be changed";
  return body();
}

FileDescriptor connect_raw(const std::string& name) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fd.reset();
  return fd;
}

TEST_F(FdChannel, NamesAreLongAndNeverTheSame) {
  std::set<std::string> names;
  for (int round = 0; round < 1000; ++round) names.insert(make_endpoint_name());
  EXPECT_EQ(names.size(), 1000u);
  for (const auto& name : names) {
    EXPECT_EQ(name.size(), 9u + 32u);
    EXPECT_TRUE(name.starts_with("penstock-"));
  }
}

TEST_F(FdChannel, AMessageComesWithItsFieldsAndWithoutADescriptor) {
  FdMessage message{.kind = kFdStart, .worker_id = 3, .arena_id = 4};
  std::strcpy(message.text, "penstock-abc");
  ASSERT_TRUE(there_->send(message));
  const auto received = here_->receive(soon());
  ASSERT_TRUE(received) << received.error().message;
  EXPECT_EQ(std::memcmp(&received.value().message, &message, sizeof message), 0);
  EXPECT_FALSE(received.value().fd);
}

TEST_F(FdChannel, ADescriptorIsTheSameFileAndIsClosedOnExec) {
  const FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC));
  ASSERT_TRUE(there_->send({.kind = kFdArena}, file.get()));
  const auto received = here_->receive(soon());
  ASSERT_TRUE(received) << received.error().message;
  struct stat sent {};
  struct stat passed {};
  ASSERT_EQ(::fstat(file.get(), &sent), 0);
  ASSERT_EQ(::fstat(received.value().fd.get(), &passed), 0);
  EXPECT_EQ(sent.st_ino, passed.st_ino);
  EXPECT_NE(received.value().fd.get(), file.get());
  EXPECT_EQ(::fcntl(received.value().fd.get(), F_GETFD), FD_CLOEXEC);
}

TEST_F(FdChannel, MessagesKeepTheirOrderAndEachItsOwnDescriptor) {
  for (uint32_t index = 0; index < 20; ++index) {
    const FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(file.get(), index), 0);
    ASSERT_TRUE(there_->send({.kind = kFdArena, .arena_id = index}, file.get()));
  }
  for (uint32_t index = 0; index < 20; ++index) {
    const auto received = here_->receive(soon());
    ASSERT_TRUE(received) << received.error().message;
    EXPECT_EQ(received.value().message.arena_id, index);
    struct stat status {};
    ASSERT_EQ(::fstat(received.value().fd.get(), &status), 0);
    EXPECT_EQ(status.st_size, index);
  }
}

TEST_F(FdChannel, NothingBeforeTheDeadlineIsATimeout) {
  EXPECT_EQ(here_->receive(steady_clock::now() - minutes(1)).error().code, Errc::kTimeout);
  EXPECT_EQ(here_->receive(steady_clock::now() + milliseconds(3)).error().code, Errc::kTimeout);
}

TEST_F(FdChannel, AMessageThatIsThereIsReceivedAfterTheDeadlineToo) {
  ASSERT_TRUE(there_->send({.kind = kFdHello}));
  EXPECT_TRUE(here_->receive(steady_clock::now() - minutes(1)));
}

TEST_F(FdChannel, WhatAPeerSentBeforeItDiedIsReceivedAndThenItIsClosed) {
  ASSERT_TRUE(there_->send({.kind = kFdHello}));
  there_.reset();
  EXPECT_TRUE(here_->receive(soon()));
  EXPECT_EQ(refusal(), Errc::kClosed);
}

TEST_F(FdChannel, SendingToAPeerThatIsGoneIsClosedAndNoSignal) {
  there_.reset();
  EXPECT_EQ(here_->send({.kind = kFdHello}).error().code, Errc::kClosed);
}

TEST_F(FdChannel, APeerThatDiedWithMessagesUnreadIsClosed) {
  ASSERT_TRUE(here_->send({.kind = kFdHello}));
  there_.reset();
  EXPECT_EQ(refusal(), Errc::kClosed);
}

TEST_F(FdChannel, ShuttingDownIsSeenThoughAForkedChildHoldsACopy) {
  test::Gate end;
  test::ChildProcess child([&]() -> std::string { return end.pass(), ""; });
  there_->shut_down();
  EXPECT_EQ(refusal(), Errc::kClosed);
  end.open();
  EXPECT_EQ(child.join(), "");
}

TEST_F(FdChannel, AnotherMagicIsMalformed) {
  ASSERT_TRUE(there_->send({.magic = 0x31464451}));
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(FdChannel, AMessageOfAnotherLengthIsMalformed) {
  const auto bytes = message_bytes({});
  send_raw(std::span(bytes).first(63));
  EXPECT_EQ(refusal(), Errc::kMalformed);
  send_raw(message_bytes({}, 1));
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(FdChannel, DescriptorsBesideTheOneThatIsExpectedAreClosed) {
  const size_t before = open_fd_count();
  const std::array<int, 2> two = {STDOUT_FILENO, STDERR_FILENO};
  send_raw(message_bytes({.kind = kFdArena}), two);
  EXPECT_EQ(refusal(), Errc::kMalformed);
  const std::array<int, 5> five = {0, 1, 2, 0, 1};
  send_raw(message_bytes({.kind = kFdArena}), five);
  EXPECT_FALSE(here_->receive(soon()));
  EXPECT_EQ(open_fd_count(), before);
}

TEST_F(FdChannel, ADescriptorWithAMalformedMessageIsClosed) {
  const size_t before = open_fd_count();
  ASSERT_TRUE(there_->send({.magic = 1, .kind = kFdArena}, STDOUT_FILENO));
  EXPECT_EQ(refusal(), Errc::kMalformed);
  EXPECT_EQ(open_fd_count(), before);
}

TEST_F(FdChannel, ADescriptorThatIsLostToTheOpenFilesLimitIsNoMemoryAndSaysWhatToRaise) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              if (!there_->send({.kind = kFdArena}, STDOUT_FILENO)) return "not sent";
              const int next_fd = ::dup(STDOUT_FILENO);
              ::close(next_fd);
              const auto count = static_cast<rlim_t>(next_fd);
              const rlimit limit{.rlim_cur = count, .rlim_max = count};
              ::setrlimit(RLIMIT_NOFILE, &limit);
              const auto received = here_->receive(soon());
              if (received) return "a descriptor came though none can be open";
              if (received.error().code != Errc::kNoMemory) return received.error().message;
              return received.error().message.find("ulimit -n") != std::string::npos ? "" : received.error().message;
            }),
            "");
}

TEST_F(FdChannel, AWorkerConnectsAndBothSidesTalk) {
  const auto name = make_endpoint_name();
  auto listener = FdListener::bind(name);
  ASSERT_TRUE(listener) << listener.error().message;
  EXPECT_EQ(listener.value().accept().error().code, Errc::kTimeout);
  auto worker = FdConnection::connect(name);
  ASSERT_TRUE(worker) << worker.error().message;
  ASSERT_TRUE(worker.value().send({.kind = kFdHello, .worker_id = 5}));
  auto trainer = listener.value().accept();
  ASSERT_TRUE(trainer) << trainer.error().message;
  EXPECT_EQ(trainer.value().receive(soon()).value().message.worker_id, 5u);
  ASSERT_TRUE(trainer.value().send({.kind = kFdStart}));
  EXPECT_EQ(worker.value().receive(soon()).value().message.kind, uint32_t{kFdStart});
}

TEST_F(FdChannel, ConnectingWhereNobodyListensIsClosed) {
  EXPECT_EQ(FdConnection::connect(make_endpoint_name()).error().code, Errc::kClosed);
}

TEST_F(FdChannel, BindingANameTwiceIsAnError) {
  const auto name = make_endpoint_name();
  const auto listener = FdListener::bind(name);
  ASSERT_TRUE(listener);
  EXPECT_FALSE(FdListener::bind(name));
}

TEST_F(FdChannel, AcceptingWithoutRoomForADescriptorIsNoMemory) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              const auto name = make_endpoint_name();
              auto listener = FdListener::bind(name).value();
              const auto worker = FdConnection::connect(name);
              const int next_fd = ::dup(STDOUT_FILENO);
              ::close(next_fd);
              const auto count = static_cast<rlim_t>(next_fd);
              const rlimit limit{.rlim_cur = count, .rlim_max = count};
              ::setrlimit(RLIMIT_NOFILE, &limit);
              const auto accepted = listener.accept();
              if (accepted) return "accepted";
              return accepted.error().code == Errc::kNoMemory ? "" : accepted.error().message;
            }),
            "");
}

TEST_F(FdChannel, AProcessOfAnotherUserIsClosedUnansweredAndTheNextIsAccepted) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  const auto name = make_endpoint_name();
  auto listener = FdListener::bind(name).value();
  test::Gate connected;
  test::ChildProcess stranger([&] {
    return as_another_user([&]() -> std::string {
      const FileDescriptor fd = connect_raw(name);
      connected.open();
      if (!fd) return "a stranger could not even connect";
      char byte = 0;
      return ::recv(fd.get(), &byte, 1, 0) == 0 ? "" : "the trainer answered a stranger";
    });
  });
  connected.pass();
  const auto worker = FdConnection::connect(name);
  ASSERT_TRUE(worker) << worker.error().message;
  EXPECT_TRUE(listener.accept());
  EXPECT_EQ(stranger.join(), "");
  EXPECT_EQ(listener.accept().error().code, Errc::kTimeout);
}

TEST_F(FdChannel, AWorkerSendsNothingToAListenerOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  const auto name = make_endpoint_name();
  const auto listener = FdListener::bind(name).value();
  EXPECT_EQ(test::in_child([&] {
              return as_another_user([&]() -> std::string {
                const auto connection = FdConnection::connect(name);
                if (connection) return "connected to a listener of another user";
                return connection.error().code == Errc::kClosed ? "" : connection.error().message;
              });
            }),
            "");
}

}  // namespace
}  // namespace penstock::shm
