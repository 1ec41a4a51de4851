// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Unix stream socket between two processes of one user, for example between a trainer and a worker, or between a
// server and the processes that make its batches. It carries messages of any length and file descriptors with them. The
// end of a peer is seen only after everything that it has sent.
//
// A message is a head followed by its bytes. Its descriptors arrive with the first byte, and the head has their number:
// descriptors are received in order, so each message takes the next ones. PROTOCOL.md is the specification.

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
// The largest message is a batch for which no shared memory was available: up to the largest batch of a pool.
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 34;
// The files of a batch and the arena that contains it.
constexpr size_t kMessageFdCountMax = wire::kSharedFileCountMax + 1;
// While this many bytes are unsent, post() fails. Below the limit, one more message of any size is accepted.
constexpr uint64_t kUnsentBytesMax = uint64_t{1} << 30;

struct MessageHead {
  uint32_t magic = kMessageMagic;
  uint32_t fd_count = 0;
  uint64_t bytes = 0;  // after the head
};
static_assert(sizeof(MessageHead) == 16);

// The two ends of a channel, before they are handed to their processes.
struct ChannelEnds {
  FileDescriptor here;
  FileDescriptor there;
};

// Confined to one thread.
class Channel {
 public:
  // `socket` is connected. A received message with more bytes than `received_bytes_max` is malformed.
  explicit Channel(FileDescriptor socket, uint64_t received_bytes_max = kMessageBytesMax)
      : socket_(std::move(socket)), received_bytes_max_(received_bytes_max) {}

  // Fails with kNoMemory if no descriptor is left.
  static Result<ChannelEnds> open_pair();
  // Connects to a listener of this user.
  static Result<Channel> connect(const std::string& name, uint64_t received_bytes_max = kMessageBytesMax);

  int fd() const { return socket_.get(); }

  // The bytes of a message, one part after the other; at most kPartCountMax of them.
  using Parts = std::span<const std::span<const std::byte>>;
  static constexpr size_t kPartCountMax = 4;

  // Sends a message. kClosed if the peer is gone, kTooLarge above the limit. Blocks until the socket has taken all of
  // it.
  Result<void> send(Parts parts, std::span<const int> fds = {});
  // The same, for a record of fixed size.
  template <typename Record>
  Result<void> send_record(const Record& record, std::span<const int> fds = {}) {
    const auto bytes = std::as_bytes(std::span(&record, 1));
    return send({&bytes, 1}, fds);
  }

  // Sends a message without descriptors and without blocking: bytes that the socket does not take now are kept for
  // flush(). kTooLarge if kUnsentBytesMax are already kept.
  Result<void> post(Parts parts);
  // The same, for bytes that are posted to several peers: they are stored once.
  Result<void> post(std::shared_ptr<const std::vector<std::byte>> bytes);
  // Sends a message with descriptors without blocking. Returns false if the socket has no room for it now, or earlier
  // messages are still unsent.
  Result<bool> try_send(Parts parts, std::span<const int> fds);
  // Sends the kept bytes as far as the socket takes them. kClosed if the peer is gone; the kept bytes are then dropped.
  Result<void> flush();
  bool has_unsent() const { return !unsent_.empty(); }

  // A received message. The bytes are valid until more are read, the descriptors until the next message.
  struct Message {
    std::span<const std::byte> bytes;
    std::span<FileDescriptor> fds;

    // Returns the bytes as a record of fixed size, or none if their size differs.
    template <typename Record>
    std::optional<Record> as() const {
      Record record;
      if (bytes.size() != sizeof record) return std::nullopt;
      std::memcpy(&record, bytes.data(), sizeof record);
      return record;
    }
  };
  // Reads the bytes available at the socket, by one system call and without blocking: several messages, or a part of
  // one. Call it when next() returns none. Returns false if the socket has no bytes. kClosed if the peer hung up. After
  // any other error the channel cannot be used further.
  Result<bool> fill() { return fill(/*may_block=*/false); }
  // Whether bytes were read that next() has not returned yet.
  bool has_taken_in() const { return begin_ != end_; }
  // Returns the next message that was read, or none if no message is complete.
  Result<std::optional<Message>> next();
  // Waits for the next message until `deadline`. kTimeout if none arrived, kClosed as in fill(). Blocks.
  Result<Message> receive(std::chrono::steady_clock::time_point deadline);

  // Signals to the peer that this side is done, even if another process holds a copy of the socket.
  void shut_down();

 private:
  struct Unsent {
    std::shared_ptr<const std::vector<std::byte>> bytes;  // shared with other channels that they are posted to
    size_t begin;                                         // everything before it is sent
  };

  Result<bool> fill(bool may_block);
  // `shared`, if not null, holds the bytes of the last part.
  Result<void> post(Parts parts, std::shared_ptr<const std::vector<std::byte>> shared);
  Result<void> check_unsent() const;
  void keep(std::shared_ptr<const std::vector<std::byte>> bytes, size_t begin);
  void make_room();
  Fault fail(Fault fault);

  FileDescriptor socket_;
  uint64_t received_bytes_max_;
  std::deque<Unsent> unsent_;
  uint64_t unsent_bytes_ = 0;

  std::vector<std::byte> buffer_;  // bytes that were read but not returned are in [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::deque<FileDescriptor> fds_;  // of messages that were not returned yet
  std::vector<FileDescriptor> message_fds_;
  std::optional<Fault> fault_;  // set when later bytes cannot be interpreted any more
  bool has_slices_ = false;     // whether SO_RCVTIMEO bounds a blocking receive
};

// Accepts channels to this process by name. Names are in the abstract namespace, so a killed process leaves no files
// behind; a peer of another user is refused by its kernel credentials. Confined to one thread.
class ChannelListener {
 public:
  static Result<ChannelListener> bind(const std::string& name);

  // Readable when a connection is waiting.
  int fd() const { return socket_.get(); }
  // Returns the next connection from a process of this user, with this limit for each received message; kTimeout if
  // none is waiting. Closes others without an answer.
  Result<Channel> accept(uint64_t received_bytes_max = kMessageBytesMax);

 private:
  explicit ChannelListener(FileDescriptor socket) : socket_(std::move(socket)) {}
  FileDescriptor socket_;
};

}  // namespace penstock::shm
