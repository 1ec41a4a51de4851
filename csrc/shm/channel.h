// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Unix stream socket between two processes of one user, as between a trainer and a worker, or between a server and
// the processes that make its batches. It carries messages of any length, and file descriptors with them. A peer's end
// is seen behind all that it has sent.
//
// A message is a head and its bytes. Its descriptors come along with the first byte, and the head says how many they
// are: descriptors are received in their order, so each message takes the next ones. PROTOCOL.md is the specification.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "wire/frame.h"

namespace penstock::shm {

constexpr uint32_t kMessageMagic = 0x314d4e50;  // "PNM1"
// The largest message is a batch for which there was no shared memory: as large as a batch of a pool may be.
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 34;
// A batch's files, and the arena that it lies in.
constexpr size_t kMessageFdCountMax = wire::kSharedFileCountMax + 1;
// Beyond this, nothing is posted to a peer that does not read. One message may be begun below it, whatever its size.
constexpr uint64_t kUnsentBytesMax = uint64_t{1} << 30;

struct MessageHead {
  uint32_t magic = kMessageMagic;
  uint32_t fd_count = 0;
  uint64_t bytes = 0;  // that follow
};
static_assert(sizeof(MessageHead) == 16);

// The two ends of a channel, before they are shared out.
struct ChannelEnds {
  FileDescriptor here;
  FileDescriptor there;
};

// Confined to one thread.
class Channel {
 public:
  // `socket` is connected. A message of the peer's with more bytes than `received_bytes_max` is malformed.
  explicit Channel(FileDescriptor socket, uint64_t received_bytes_max = kMessageBytesMax)
      : socket_(std::move(socket)), received_bytes_max_(received_bytes_max) {}

  // kNoMemory where no descriptor is left.
  static Result<ChannelEnds> open_pair();
  // Connects to a listener of this user.
  static Result<Channel> connect(const std::string& name);

  int fd() const { return socket_.get(); }

  // The bytes of a message, one part after the other; at most kPartCountMax of them.
  using Parts = std::span<const std::span<const std::byte>>;
  static constexpr size_t kPartCountMax = 4;

  // Sends a message. kClosed when the peer is gone, kTooLarge for one above the limit. Blocks until the socket has it.
  Result<void> send(Parts parts, std::span<const int> fds = {});
  // The same, of a record of fixed size.
  template <typename Record>
  Result<void> send_record(const Record& record, std::span<const int> fds = {}) {
    const auto bytes = std::as_bytes(std::span(&record, 1));
    return send({&bytes, 1}, fds);
  }

  // Sends a message without descriptors and without blocking: bytes that the socket does not take now are kept for
  // flush(). kTooLarge when kUnsentBytesMax are kept already.
  Result<void> post(Parts parts);
  // The same, for bytes that are posted to several peers: they are kept once.
  Result<void> post(std::shared_ptr<const std::vector<std::byte>> bytes);
  // Sends a message with descriptors without blocking. False where the socket has no room for it now, or something
  // else is still to be sent.
  Result<bool> try_send(Parts parts, std::span<const int> fds);
  // Sends what was kept, as far as the socket takes it. kClosed when the peer is gone, and then nothing is kept.
  Result<void> flush();
  bool has_unsent() const { return !unsent_.empty(); }

  // A message that has come. The bytes are valid until more are taken in, the descriptors until the next message.
  struct Message {
    std::span<const std::byte> bytes;
    std::span<FileDescriptor> fds;

    // The bytes as a record of fixed size; nothing if they are of another size.
    template <typename Record>
    std::optional<Record> as() const {
      Record record;
      if (bytes.size() != sizeof record) return std::nullopt;
      std::memcpy(&record, bytes.data(), sizeof record);
      return record;
    }
  };
  // Takes in what the socket has, by one system call and without blocking: several messages, or a part of one. To be
  // called when next() has nothing. False where the socket has nothing. kClosed when the peer hung up. After another
  // error the channel cannot go on.
  Result<bool> fill() { return fill(/*may_block=*/false); }
  // Whether there is anything of a message that next() has not given out.
  bool has_taken_in() const { return begin_ != end_; }
  // The next message of what was taken in; nothing where none is whole.
  Result<std::optional<Message>> next();
  // Waits for the next message until `deadline`. kTimeout when none came, kClosed as fill(). Blocks.
  Result<Message> receive(std::chrono::steady_clock::time_point deadline);

  // Tells the peer that this side is done, also where another process holds a copy of the socket.
  void shut_down();

 private:
  struct Unsent {
    std::shared_ptr<const std::vector<std::byte>> bytes;  // shared with other channels that they are posted to
    size_t begin;                                         // before it, all is sent
  };

  Result<bool> fill(bool may_block);
  // `shared`, where it is not null, has the bytes of the last part.
  Result<void> post(Parts parts, std::shared_ptr<const std::vector<std::byte>> shared);
  Result<void> check_unsent() const;
  void keep(std::shared_ptr<const std::vector<std::byte>> bytes, size_t begin);
  void make_room();
  Fault fail(Fault fault);

  FileDescriptor socket_;
  uint64_t received_bytes_max_;
  std::deque<Unsent> unsent_;
  uint64_t unsent_bytes_ = 0;

  std::vector<std::byte> buffer_;  // what was taken in and not given out lies from begin_ to end_
  size_t begin_ = 0;
  size_t end_ = 0;
  std::deque<FileDescriptor> fds_;  // of messages that were not given out
  std::vector<FileDescriptor> message_fds_;
  std::optional<Fault> fault_;  // nothing that comes can be relied on any more
  bool has_slices_ = false;     // a receive that blocks ends by itself
};

// Where a channel to this process is opened by name. Names live in the abstract namespace, so nothing is left in the
// file system whoever is killed; a peer of another user is refused by its kernel credentials. Confined to one thread.
class ChannelListener {
 public:
  static Result<ChannelListener> bind(const std::string& name);

  // The next connection of a process of this user, kTimeout when none is waiting. Others are closed unanswered.
  Result<Channel> accept();

 private:
  explicit ChannelListener(FileDescriptor socket) : socket_(std::move(socket)) {}
  FileDescriptor socket_;
};

}  // namespace penstock::shm
