// SPDX-License-Identifier: Apache-2.0
#include "shm/channel.h"
#include "base/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/child_process.h"

namespace penstock::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

constexpr uid_t kAnotherUser = 65534;

Bytes filled(size_t size, int value) { return Bytes(size, static_cast<std::byte>(value)); }

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

FileDescriptor make_file(off_t size = 0) {
  FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(file.get(), size), 0);
  return file;
}

// Which file it is, and how large.
std::pair<ino_t, off_t> identity_of(int fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd, &status), 0);
  return {status.st_ino, status.st_size};
}

// A message as it crosses, with a head that may be wrong.
Bytes message_bytes(const MessageHead& head, std::string_view text = {}) {
  Bytes bytes(sizeof head);
  std::memcpy(bytes.data(), &head, sizeof head);
  const auto rest = bytes_of(text);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  return bytes;
}

class ChannelTest : public testing::Test {
 protected:
  ChannelTest() {
    auto ends = Channel::open_pair().value();
    here_.emplace(std::move(ends.here));
    there_.emplace(std::move(ends.there));
  }

  static steady_clock::time_point soon() { return steady_clock::now() + minutes(1); }

  static Result<void> send(Channel& channel, std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    return channel.send({&bytes, 1}, fds);
  }
  static Result<void> send(Channel& channel, std::string_view text, std::span<const int> fds = {}) {
    return send(channel, std::as_bytes(std::span(text)), fds);
  }
  static Result<void> post(Channel& channel, std::span<const std::byte> bytes) { return channel.post({&bytes, 1}); }
  static Result<bool> try_send(Channel& channel, std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    return channel.try_send({&bytes, 1}, fds);
  }

  // The next message as text, with the number of its descriptors if it has any, or the name of the error.
  std::string received() { return format_message(here_->receive(soon())); }
  static std::string format_message(const Result<Channel::Message>& message) {
    if (!message) return std::string(errc_name(message.error().code));
    const auto bytes = message.value().bytes;
    std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!message.value().fds.empty()) text += " +" + std::to_string(message.value().fds.size());
    return text;
  }

  // Another pair, whose reader takes messages of so many bytes.
  void open_with(uint64_t received_bytes_max) {
    auto ends = Channel::open_pair().value();
    here_.emplace(std::move(ends.here), received_bytes_max);
    there_.emplace(std::move(ends.there));
  }

  // Sends bytes and descriptors as they are.
  void send_raw(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
    alignas(cmsghdr) std::array<char, 512> control{};
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
  // The error that ends the channel: it stays.
  Fault fault() {
    const auto first = here_->receive(soon());
    EXPECT_FALSE(first);
    const auto second = here_->next();
    EXPECT_FALSE(second);
    if (first || second) return {Errc::kFailed, "a message came"};
    EXPECT_TRUE(first.error() == second.error()) << second.error().message;
    return first.error();
  }

  static size_t open_fd_count() {
    size_t count = 0;
    DIR* folder = ::opendir("/proc/self/fd");
    while (::readdir(folder) != nullptr) ++count;
    ::closedir(folder);
    return count;
  }

  std::optional<Channel> here_;
  std::optional<Channel> there_;
};

// The refusal of a process of another user. Runs in a child, as root may take any user.
std::string as_another_user(const std::function<std::string()>& body) {
  if (::setgid(kAnotherUser) != 0 || ::setuid(kAnotherUser) != 0) return "the user could not be changed";
  return body();
}

FileDescriptor connect_raw(const std::string& name) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fd.reset();
  return fd;
}

TEST_F(ChannelTest, NamesAreLongAndNeverTheSame) {
  std::set<std::string> names;
  for (int round = 0; round < 1000; ++round) names.insert(make_endpoint_name());
  EXPECT_EQ(names.size(), 1000u);
  for (const auto& name : names) {
    EXPECT_EQ(name.size(), 9u + 32u);
    EXPECT_TRUE(name.starts_with("penstock-"));
  }
}

// ---- Messages

TEST_F(ChannelTest, PartsOfAMessageComeOneAfterTheOther) {
  const Bytes first = bytes_of("one ");
  const Bytes second;
  const Bytes third = bytes_of("two");
  const std::span<const std::byte> parts[] = {first, second, third};
  ASSERT_TRUE(there_->send(parts));
  ASSERT_TRUE(there_->post(parts));
  EXPECT_EQ(received(), "one two");
  EXPECT_EQ(received(), "one two");
}

TEST_F(ChannelTest, MessageWithoutBytesComes) {
  ASSERT_TRUE(send(*there_, ""));
  EXPECT_EQ(received(), "");
}

TEST_F(ChannelTest, MessagesGoBothWays) {
  ASSERT_TRUE(send(*there_, "question"));
  EXPECT_EQ(received(), "question");
  ASSERT_TRUE(post(*here_, bytes_of("answer")));
  EXPECT_EQ(format_message(there_->receive(soon())), "answer");
}

TEST_F(ChannelTest, RecordIsReadByItsSize) {
  const uint64_t number = 7;
  ASSERT_TRUE(send(*there_, std::as_bytes(std::span(&number, 1))));
  const auto message = here_->receive(soon()).value();
  EXPECT_EQ(message.as<uint64_t>(), number);
  EXPECT_EQ(message.as<uint32_t>(), std::nullopt);
}

TEST_F(ChannelTest, MessageThatComesByteByByteIsWholeAtItsEnd) {
  const auto bytes = message_bytes({.fd_count = 1, .bytes = 5}, "hello");
  for (int round = 0; round < 3; ++round) {
    const FileDescriptor file = make_file(round);
    const int fd = file.get();
    for (size_t index = 0; index < bytes.size(); ++index) {
      send_raw(std::span(bytes).subspan(index, 1), index == 0 ? std::span(&fd, 1) : std::span<const int>());
      ASSERT_TRUE(here_->fill().value());
      const auto message = here_->next();
      ASSERT_TRUE(message) << message.error().message;
      ASSERT_EQ(message.value().has_value(), index + 1 == bytes.size()) << index;
      if (!message.value()) continue;
      EXPECT_EQ(format_message(*message.value()), "hello +1");
      EXPECT_EQ(identity_of(message.value()->fds.front().get()), identity_of(fd));
    }
  }
}

TEST_F(ChannelTest, MessagesThatAreCutAnywhereAreTheSame) {
  Bytes bytes;
  for (const std::string_view text : {"first", "", "the third"}) {
    const auto message = message_bytes({.bytes = text.size()}, text);
    bytes.insert(bytes.end(), message.begin(), message.end());
  }
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    std::vector<std::string> texts;
    for (const auto part : {std::span(bytes).first(cut), std::span(bytes).subspan(cut)}) {
      if (part.empty()) continue;
      send_raw(part);
      ASSERT_TRUE(here_->fill().value());
      for (auto message = here_->next(); message && message.value(); message = here_->next())
        texts.push_back(format_message(*message.value()));
    }
    EXPECT_EQ(texts, (std::vector<std::string>{"first", "", "the third"})) << cut;
  }
}

TEST_F(ChannelTest, MessagesThatWaitAreTakenInAtOnce) {
  for (int index = 0; index < 100; ++index) ASSERT_TRUE(send(*there_, std::to_string(index)));
  ASSERT_TRUE(here_->fill().value());
  for (int index = 0; index < 100; ++index) {
    const auto message = here_->next();
    ASSERT_TRUE(message && message.value()) << index;
    EXPECT_EQ(format_message(*message.value()), std::to_string(index));
  }
  EXPECT_FALSE(here_->fill().value());
}

TEST_F(ChannelTest, LargeMessagesThatArePostedComeWholeAndInOrder) {
  // Larger than a socket's memory, than the buffer, and than the first step in which the buffer grows.
  for (const size_t size : {size_t{1}, size_t{70'000}, size_t{3'000'000}, size_t{70'000'000}}) {
    ASSERT_TRUE(post(*there_, filled(size, 1)));
    ASSERT_TRUE(post(*there_, bytes_of("behind it")));
    std::vector<size_t> sizes;
    while (sizes.size() < 2) {
      ASSERT_TRUE(there_->flush());
      const auto filled = here_->fill();
      ASSERT_TRUE(filled) << filled.error().message;
      for (auto message = here_->next(); message && message.value(); message = here_->next()) {
        const auto bytes = message.value()->bytes;
        sizes.push_back(bytes.size());
        if (sizes.size() > 1) continue;
        EXPECT_EQ(bytes.front(), std::byte{1});
        EXPECT_EQ(std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1), 0) << "they are all the same";
      }
    }
    EXPECT_EQ(sizes, (std::vector<size_t>{size, 9}));
    EXPECT_FALSE(there_->has_unsent());
  }
}

TEST_F(ChannelTest, LargeMessagesThatAreSentBlockUntilTheyAreRead) {
  test::ChildProcess child([&]() -> std::string {
    for (int round = 1; round <= 5; ++round)
      if (const auto sent = send(*there_, filled(1'000'000, round)); !sent) return sent.error().message;
    return "";
  });
  for (int round = 1; round <= 5; ++round) {
    const auto message = here_->receive(soon());
    ASSERT_TRUE(message) << message.error().message;
    EXPECT_EQ(Bytes(message.value().bytes.begin(), message.value().bytes.end()), filled(1'000'000, round));
  }
  EXPECT_EQ(child.join(), "");
}

TEST_F(ChannelTest, MessagesBehindAPeerThatDoesNotReadAreKeptInTheirOrder) {
  const auto shared = std::make_shared<const Bytes>(filled(5000, 7));
  for (int index = 0; index < 500; ++index) {
    ASSERT_TRUE(post(*there_, bytes_of(std::to_string(index))));
    ASSERT_TRUE(there_->post(shared));
  }
  ASSERT_TRUE(there_->has_unsent()) << "they fit the socket";
  EXPECT_GT(shared.use_count(), 1) << "bytes for several peers are copied";
  for (int count = 0; count < 1000;) {
    ASSERT_TRUE(there_->flush());
    ASSERT_TRUE(here_->fill());
    for (auto message = here_->next(); message && message.value(); message = here_->next(), ++count) {
      if (count % 2 == 0) {
        ASSERT_EQ(format_message(*message.value()), std::to_string(count / 2));
      } else {
        ASSERT_EQ(message.value()->bytes.size(), 5000u);
      }
    }
  }
  EXPECT_FALSE(there_->has_unsent());
  EXPECT_EQ(shared.use_count(), 1);
}

TEST_F(ChannelTest, NothingIsPostedBeyondTheLimitToAPeerThatDoesNotRead) {
  const auto shared = std::make_shared<const Bytes>(kUnsentBytesMax / 16);
  for (int count = 0; count < 17; ++count) ASSERT_TRUE(there_->post(shared)) << count;
  const auto refused = there_->post(shared);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kTooLarge);
  EXPECT_EQ(post(*there_, bytes_of("x")).error().code, Errc::kTooLarge);
}

TEST_F(ChannelTest, NothingBeforeTheDeadlineIsATimeout) {
  EXPECT_EQ(here_->receive(steady_clock::now() - minutes(1)).error().code, Errc::kTimeout);
  EXPECT_EQ(here_->receive(steady_clock::now() + milliseconds(3)).error().code, Errc::kTimeout);
  EXPECT_EQ(here_->receive(steady_clock::now() + milliseconds(120)).error().code, Errc::kTimeout);
}

TEST_F(ChannelTest, MessageThatIsThereIsReceivedAfterTheDeadlineToo) {
  ASSERT_TRUE(send(*there_, "late"));
  EXPECT_EQ(format_message(here_->receive(steady_clock::now() - minutes(1))), "late");
}

// ---- Sending with descriptors and without blocking

TEST_F(ChannelTest, WhatIsTriedComesWithItsDescriptors) {
  const FileDescriptor file = make_file(9);
  const int fd = file.get();
  ASSERT_TRUE(try_send(*there_, bytes_of("file"), {&fd, 1}).value());
  ASSERT_TRUE(try_send(*there_, bytes_of("none")).value());
  EXPECT_FALSE(there_->has_unsent());
  const auto message = here_->receive(soon());
  EXPECT_EQ(format_message(message), "file +1");
  EXPECT_EQ(identity_of(message.value().fds.front().get()), identity_of(fd));
  EXPECT_EQ(received(), "none");
}

TEST_F(ChannelTest, TryingWhereThePeerDoesNotReadIsFalseAndSendsNothing) {
  int count = 0;
  while (try_send(*there_, bytes_of(std::to_string(count))).value()) ++count;
  ASSERT_GT(count, 0);
  const FileDescriptor file = make_file();
  const int fd = file.get();
  EXPECT_FALSE(try_send(*there_, bytes_of(std::to_string(count)), {&fd, 1}).value());
  EXPECT_FALSE(there_->has_unsent());
  for (int index = 0; index < count; ++index) ASSERT_EQ(received(), std::to_string(index));
  EXPECT_FALSE(here_->fill().value());
  ASSERT_TRUE(try_send(*there_, bytes_of("again")).value());
  EXPECT_EQ(received(), "again") << "a descriptor came of a message that was not sent";
}

TEST_F(ChannelTest, RestOfWhatIsTriedIsKeptInItsOrderAndNothingOvertakesIt) {
  const FileDescriptor file = make_file(9);
  const int fd = file.get();
  ASSERT_TRUE(try_send(*there_, filled(3'000'000, 1), {&fd, 1}).value());
  ASSERT_TRUE(there_->has_unsent()) << "it fits the socket";
  EXPECT_FALSE(try_send(*there_, bytes_of("overtakes"), {&fd, 1}).value());
  ASSERT_TRUE(post(*there_, bytes_of("behind it")));
  EXPECT_FALSE(try_send(*there_, bytes_of("overtakes")).value());
  std::vector<std::pair<size_t, size_t>> seen;  // bytes and descriptors
  while (seen.size() < 2) {
    ASSERT_TRUE(there_->flush());
    ASSERT_TRUE(here_->fill());
    for (auto message = here_->next(); message && message.value(); message = here_->next())
      seen.emplace_back(message.value()->bytes.size(), message.value()->fds.size());
  }
  EXPECT_EQ(seen, (std::vector<std::pair<size_t, size_t>>{{3'000'000, 1}, {9, 0}}));
  ASSERT_TRUE(try_send(*there_, bytes_of("now"), {&fd, 1}).value());
  EXPECT_EQ(received(), "now +1");
}

TEST_F(ChannelTest, TryingBehindWhatWasPostedAndIsUnsentIsFalse) {
  ASSERT_TRUE(post(*there_, filled(3'000'000, 1)));
  ASSERT_TRUE(there_->has_unsent());
  EXPECT_FALSE(try_send(*there_, bytes_of("overtakes")).value());
}

TEST_F(ChannelTest, TryingIsAnErrorWhereThePeerIsGoneAndAboveTheLimit) {
  const Bytes bytes(1);
  EXPECT_EQ(try_send(*there_, std::span(bytes.data(), kMessageBytesMax + 1)).error().code, Errc::kTooLarge);
  here_.reset();
  EXPECT_EQ(try_send(*there_, bytes).error().code, Errc::kClosed);
}

// ---- The end of a peer

TEST_F(ChannelTest, MessagesOfAPeerThatHasDiedComeBeforeItsEnd) {
  ASSERT_TRUE(send(*there_, "one"));
  ASSERT_TRUE(send(*there_, "two"));
  there_.reset();
  EXPECT_EQ(received(), "one");
  EXPECT_EQ(received(), "two");
  EXPECT_EQ(received(), "closed");
}

// The kernel says ECONNRESET there.
TEST_F(ChannelTest, MessagesOfAPeerThatDiedWithMessagesUnreadComeBeforeItsEnd) {
  ASSERT_TRUE(send(*here_, "unread"));
  ASSERT_TRUE(send(*there_, "one"));
  ASSERT_TRUE(send(*there_, "two"));
  there_.reset();
  EXPECT_FALSE(post(*here_, bytes_of("nobody")));
  EXPECT_EQ(received(), "one");
  EXPECT_EQ(received(), "two");
  EXPECT_EQ(received(), "closed");
}

TEST_F(ChannelTest, PeerThatDiesInTheMiddleOfAMessageIsClosed) {
  const auto bytes = message_bytes({.bytes = 5}, "hell");
  send_raw(bytes);
  there_.reset();
  EXPECT_EQ(received(), "closed");
}

TEST_F(ChannelTest, SendingToAPeerThatIsGoneIsClosedAndNoSignal) {
  there_.reset();
  EXPECT_EQ(send(*here_, "x").error().code, Errc::kClosed);
  EXPECT_EQ(post(*here_, bytes_of("x")).error().code, Errc::kClosed);
}

TEST_F(ChannelTest, NothingIsKeptForAPeerThatIsGone) {
  ASSERT_TRUE(post(*here_, filled(10'000'000, 1)));
  ASSERT_TRUE(here_->has_unsent());
  there_.reset();
  EXPECT_EQ(here_->flush().error().code, Errc::kClosed);
  EXPECT_FALSE(here_->has_unsent());
}

TEST_F(ChannelTest, ShuttingDownIsSeenThoughAForkedChildHoldsACopy) {
  test::Gate end;
  test::ChildProcess child([&]() -> std::string { return end.pass(), ""; });
  there_->shut_down();
  EXPECT_EQ(received(), "closed");
  end.open();
  EXPECT_EQ(child.join(), "");
}

TEST_F(ChannelTest, ShuttingDownEndsAWaitOfThisSide) {
  test::ChildProcess child([&]() -> std::string {
    const auto message = here_->receive(soon());
    if (message) return "a message came";
    return message.error().code == Errc::kClosed ? "" : message.error().message;
  });
  here_->shut_down();  // the child waits for it by its own copy
  EXPECT_EQ(child.join(), "");
}

// ---- Descriptors

TEST_F(ChannelTest, DescriptorIsTheSameFileAndIsClosedOnExec) {
  const FileDescriptor file = make_file();
  const int fd = file.get();
  ASSERT_TRUE(send(*there_, "file", {&fd, 1}));
  const auto message = here_->receive(soon());
  ASSERT_TRUE(message) << message.error().message;
  ASSERT_EQ(message.value().fds.size(), 1u);
  const int passed = message.value().fds.front().get();
  EXPECT_EQ(identity_of(passed), identity_of(fd));
  EXPECT_NE(passed, fd);
  EXPECT_EQ(::fcntl(passed, F_GETFD), FD_CLOEXEC);
}

TEST_F(ChannelTest, EachMessageHasItsOwnDescriptorsAmongOthersWithNone) {
  for (off_t index = 0; index < 40; ++index) {
    std::vector<FileDescriptor> files;
    std::vector<int> fds;
    for (off_t count = 0; count < index % 4; ++count) {
      files.push_back(make_file(100 * index + count));
      fds.push_back(files.back().get());
    }
    ASSERT_TRUE(send(*there_, std::to_string(index), fds));
  }
  for (off_t index = 0; index < 40; ++index) {
    const auto message = here_->receive(soon());
    ASSERT_TRUE(message) << message.error().message;
    ASSERT_EQ(message.value().fds.size(), static_cast<size_t>(index % 4)) << index;
    for (off_t count = 0; count < index % 4; ++count) {
      const auto& file = message.value().fds[static_cast<size_t>(count)];
      EXPECT_EQ(identity_of(file.get()).second, 100 * index + count);
    }
  }
}

TEST_F(ChannelTest, DescriptorsOfALargeMessageComeWithIt) {
  const FileDescriptor file = make_file(9);
  test::ChildProcess child([&]() -> std::string {
    const int fd = file.get();
    const auto sent = send(*there_, filled(1'000'000, 1), {&fd, 1});
    return sent ? "" : sent.error().message;
  });
  const auto message = here_->receive(soon());
  ASSERT_TRUE(message) << message.error().message;
  EXPECT_EQ(message.value().bytes.size(), 1'000'000u);
  ASSERT_EQ(message.value().fds.size(), 1u);
  EXPECT_EQ(identity_of(message.value().fds.front().get()).second, 9);
  EXPECT_EQ(child.join(), "");
}

TEST_F(ChannelTest, AsManyDescriptorsAsMayComeDo) {
  const std::vector<int> fds(kMessageFdCountMax, STDOUT_FILENO);
  ASSERT_TRUE(send(*there_, "many", fds));
  EXPECT_EQ(received(), "many +" + std::to_string(kMessageFdCountMax));
}

TEST_F(ChannelTest, DescriptorsThatNobodyTakesAreClosed) {
  const size_t before = open_fd_count();
  const std::array<int, 2> two = {STDOUT_FILENO, STDERR_FILENO};
  ASSERT_TRUE(send(*there_, "two", two));
  ASSERT_TRUE(send(*there_, "none"));
  EXPECT_EQ(received(), "two +2");
  EXPECT_EQ(received(), "none");
  EXPECT_EQ(open_fd_count(), before);
}

TEST_F(ChannelTest, DescriptorThatIsLostToTheOpenFilesLimitIsNoMemoryAndSaysWhatToRaise) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              const int fd = STDOUT_FILENO;
              if (!send(*there_, "file", {&fd, 1})) return "not sent";
              test::leave_descriptors(0);
              const auto message = here_->receive(soon());
              if (message) return "a message came whose descriptor cannot be open";
              if (message.error().code != Errc::kNoMemory) return message.error().message;
              if (message.error().message.find("ulimit -n") == std::string::npos) return message.error().message;
              return here_->next() ? "the channel went on without the descriptor" : "";
            }),
            "");
}

TEST_F(ChannelTest, PairWithoutRoomForDescriptorsIsNoMemoryAndSaysWhatToRaise) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              test::leave_descriptors(0);
              const auto ends = Channel::open_pair();
              if (ends) return "opened";
              if (ends.error().code != Errc::kNoMemory) return ends.error().message;
              return ends.error().message.find("ulimit -n") != std::string::npos ? "" : ends.error().message;
            }),
            "");
}

// ---- What no peer of the same version sends

TEST_F(ChannelTest, AnotherMagicIsMalformed) {
  send_raw(message_bytes({.magic = 0x314d4e51}));
  EXPECT_EQ(fault().code, Errc::kMalformed);
}

TEST_F(ChannelTest, LengthAboveTheLimitIsMalformed) {
  send_raw(message_bytes({.bytes = kMessageBytesMax + 1}));
  const auto fault = this->fault();
  EXPECT_EQ(fault.code, Errc::kMalformed);
  EXPECT_NE(fault.message.find(std::to_string(kMessageBytesMax)), std::string::npos) << fault.message;
}

TEST_F(ChannelTest, MessageAboveWhatTheReaderTakesIsMalformedBeforeItsBytesCome) {
  open_with(1000);
  ASSERT_TRUE(send(*there_, filled(1000, 'x')));
  EXPECT_EQ(received(), std::string(1000, 'x'));
  send_raw(message_bytes({.bytes = 1001}));
  const auto fault = this->fault();
  EXPECT_EQ(fault.code, Errc::kMalformed);
  EXPECT_NE(fault.message.find("1001"), std::string::npos) << fault.message;
  EXPECT_NE(fault.message.find("1000"), std::string::npos) << fault.message;
}

TEST_F(ChannelTest, WhatTheReaderTakesBoundsNothingThatItSends) {
  open_with(10);
  ASSERT_TRUE(send(*here_, "more than ten bytes"));
  EXPECT_EQ(format_message(there_->receive(soon())), "more than ten bytes");
  ASSERT_TRUE(post(*here_, bytes_of("more than ten bytes")));
  ASSERT_TRUE(try_send(*here_, bytes_of("more than ten bytes")).value());
}

TEST_F(ChannelTest, MoreDescriptorsThanMayBeNamedAreMalformed) {
  send_raw(message_bytes({.fd_count = kMessageFdCountMax + 1}));
  EXPECT_EQ(fault().code, Errc::kMalformed);
}

TEST_F(ChannelTest, MoreDescriptorsThanMayComeAreMalformedAndClosed) {
  const size_t before = open_fd_count();
  const std::vector<int> fds(kMessageFdCountMax + 1, STDOUT_FILENO);
  send_raw(message_bytes({.fd_count = kMessageFdCountMax}), fds);
  const auto fault = this->fault();
  EXPECT_EQ(fault.code, Errc::kMalformed);
  EXPECT_NE(fault.message.find(std::to_string(kMessageFdCountMax)), std::string::npos) << fault.message;
  EXPECT_EQ(open_fd_count(), before);
}

TEST_F(ChannelTest, DescriptorsThatAMessageDoesNotNameAreMalformedAndClosed) {
  const size_t before = open_fd_count();
  const std::array<int, 2> two = {STDOUT_FILENO, STDERR_FILENO};
  send_raw(message_bytes({.fd_count = 1, .bytes = 1}, "x"), two);
  EXPECT_EQ(fault().code, Errc::kMalformed);
  here_.reset();
  EXPECT_EQ(open_fd_count(), before - 1) << "the socket's own";
}

TEST_F(ChannelTest, DescriptorsThatDidNotComeAreMalformed) {
  const int fd = STDOUT_FILENO;
  send_raw(message_bytes({.fd_count = 2}), {&fd, 1});
  EXPECT_EQ(fault().code, Errc::kMalformed);
}

TEST_F(ChannelTest, MessageAboveTheLimitIsNotSent) {
  const Bytes bytes(1);
  // No such memory is touched: the length is refused first.
  const std::span<const std::byte> part(bytes.data(), kMessageBytesMax + 1);
  EXPECT_EQ(there_->send({&part, 1}).error().code, Errc::kTooLarge);
  EXPECT_EQ(there_->post({&part, 1}).error().code, Errc::kTooLarge);
}

// ---- Names

TEST_F(ChannelTest, WorkerConnectsAndBothSidesTalk) {
  const auto name = make_endpoint_name();
  auto listener = ChannelListener::bind(name);
  ASSERT_TRUE(listener) << listener.error().message;
  EXPECT_EQ(listener.value().accept().error().code, Errc::kTimeout);
  auto worker = Channel::connect(name);
  ASSERT_TRUE(worker) << worker.error().message;
  ASSERT_TRUE(send(worker.value(), "hello"));
  auto trainer = listener.value().accept();
  ASSERT_TRUE(trainer) << trainer.error().message;
  EXPECT_EQ(format_message(trainer.value().receive(soon())), "hello");
  ASSERT_TRUE(send(trainer.value(), "welcome"));
  EXPECT_EQ(format_message(worker.value().receive(soon())), "welcome");
}

TEST_F(ChannelTest, ConnectingWhereNobodyListensIsClosed) {
  EXPECT_EQ(Channel::connect(make_endpoint_name()).error().code, Errc::kClosed);
}

TEST_F(ChannelTest, BindingANameTwiceIsAnError) {
  const auto name = make_endpoint_name();
  const auto listener = ChannelListener::bind(name);
  ASSERT_TRUE(listener);
  EXPECT_FALSE(ChannelListener::bind(name));
}

TEST_F(ChannelTest, AcceptingWithoutRoomForADescriptorIsNoMemory) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              const auto name = make_endpoint_name();
              auto listener = ChannelListener::bind(name).value();
              const auto worker = Channel::connect(name);
              test::leave_descriptors(0);
              const auto accepted = listener.accept();
              if (accepted) return "accepted";
              return accepted.error().code == Errc::kNoMemory ? "" : accepted.error().message;
            }),
            "");
}

TEST_F(ChannelTest, AProcessOfAnotherUserIsClosedUnansweredAndTheNextIsAccepted) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  const auto name = make_endpoint_name();
  auto listener = ChannelListener::bind(name).value();
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
  const auto worker = Channel::connect(name);
  ASSERT_TRUE(worker) << worker.error().message;
  EXPECT_TRUE(listener.accept());
  EXPECT_EQ(stranger.join(), "");
  EXPECT_EQ(listener.accept().error().code, Errc::kTimeout);
}

TEST_F(ChannelTest, AWorkerSendsNothingToAListenerOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  const auto name = make_endpoint_name();
  const auto listener = ChannelListener::bind(name).value();
  EXPECT_EQ(test::in_child([&] {
              return as_another_user([&]() -> std::string {
                const auto connection = Channel::connect(name);
                if (connection) return "connected to a listener of another user";
                return connection.error().code == Errc::kClosed ? "" : connection.error().message;
              });
            }),
            "");
}

}  // namespace
}  // namespace penstock::shm
