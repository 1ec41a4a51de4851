// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Unix socket between a worker and its trainer for two things that ZeroMQ cannot carry: descriptors, of arenas and
// of shared tensors, and the news that the other side has died. Names live in the abstract namespace, so nothing is
// left in the file system whoever is killed; a peer of another user is refused by its kernel credentials.

#include <chrono>
#include <cstdint>
#include <string>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::shm {

// The message that travels with a descriptor, or alone.
struct FdMessage {
  uint32_t magic = 0x31464450;  // "PDF1"
  uint32_t kind = 0;            // FdMessageKind
  uint32_t worker_id = 0;
  uint32_t arena_id = 0;
  // Zero-terminated. kFdStart: the name of the worker's ZeroMQ endpoint. kFdLink: the trainer and the link.
  char text[48] = {};
};
static_assert(sizeof(FdMessage) == 64);

enum FdMessageKind : uint32_t {
  kFdHello = 1,  // worker to trainer, first on the connection
  kFdStart = 2,  // trainer to worker: the ZeroMQ endpoint named in `text` is bound
  kFdArena = 3,  // worker to trainer, with the arena's descriptor
  kFdFile = 4,   // worker to trainer, with that of a file in shared memory in which tensors of its next batch lie
  kFdLink = 5,   // trainer to a worker of its own beside a pool, first on the connection: it is about to greet it
};

// The message that names the link of a pool on which the trainer will greet its own worker.
FdMessage link_message(uint64_t trainer_id, uint32_t link);

// Confined to one thread.
class FdConnection {
 public:
  explicit FdConnection(FileDescriptor fd) : fd_(std::move(fd)) {}

  // Connects to a listener of this user.
  static Result<FdConnection> connect(const std::string& name);

  int fd() const { return fd_.get(); }

  // `passed_fd` is -1 when only the message travels.
  Result<void> send(const FdMessage& message, int passed_fd = -1);

  struct Received {
    FdMessage message;
    FileDescriptor fd;
  };
  // Waits until `deadline`. kClosed when the peer is gone, kTimeout when nothing came.
  Result<Received> receive(std::chrono::steady_clock::time_point deadline);

  // Tells the peer that this side is done, also when a forked child still holds a copy of the descriptor.
  void shut_down();

 private:
  FileDescriptor fd_;
};

// Confined to one thread.
class FdListener {
 public:
  static Result<FdListener> bind(const std::string& name);

  int fd() const { return fd_.get(); }

  // Refuses everyone from now on, those waiting to be accepted included. Closing alone does not: forked workers hold
  // copies of the descriptor, and a peer in the backlog would wait for ever.
  void shut_down();

  // The next connection of a process of this user, kTimeout when none is waiting. Others are closed unanswered.
  Result<FdConnection> accept();

 private:
  explicit FdListener(FileDescriptor fd) : fd_(std::move(fd)) {}
  FileDescriptor fd_;
};

}  // namespace penstock::shm
