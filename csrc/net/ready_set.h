// SPDX-License-Identifier: Apache-2.0
#pragma once
// Waiting for many ZeroMQ sockets of which few have an event at a time. Each is added once, so that the cost of a wait
// grows with the number of events and not of sockets.
//
// A socket's descriptor (ZMQ_FD) tells that something happened, and not that a message waits. Each use of the socket
// takes that up: one receives the first of several messages, or sends one, and the descriptor is silent while messages
// wait. It can be relied on from the moment that ZMQ_EVENTS said that nothing waits until the socket is used again: a
// message that comes in that time makes it readable.
//
// Invariant: `wait` sleeps only when every socket was asked for its events after its last use, and none had a message.
// These count as used: sockets that were just added, sockets that the last `wait` named, and sockets that are marked as
// used. Only these are asked.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "net/readiness.h"

namespace penstock::net {

// Confined to the thread that uses the sockets.
class ReadySet {
 public:
  static Result<std::unique_ptr<ReadySet>> open();

  // For `open`.
  explicit ReadySet(FileDescriptor epoll) : epoll_(std::move(epoll)) {}
  ReadySet(const ReadySet&) = delete;
  ReadySet& operator=(const ReadySet&) = delete;

  // Adds sockets that are served together, or a descriptor of another kind. Returns the tag by which `wait` tells of
  // them; none is given out twice.
  Result<uint64_t> add(std::span<const Waitable> sockets);
  Result<uint64_t> add(int fd);

  // Whether `wait` tells of this descriptor of another kind when it can be written to, too.
  Result<void> watch_output(uint64_t tag, bool is_watched);

  // Before the first of them is closed: the number of a descriptor that was closed is soon another's. Closing does not
  // take it out, as libzmq closes it later, and a forked child may have a copy.
  void remove(uint64_t tag);

  // The sockets of this tag were used although the last `wait` did not tell of them: something was sent, most likely.
  void mark_used(uint64_t tag);

  // Waits until a socket may be readable, or `timeout` passes (negative: for ever). Blocks. Returns tags, each once,
  // valid until the next call. A socket that is not read to its end is named again by the next call, beside those that
  // have become readable since. A signal ends the wait early.
  Result<std::span<const uint64_t>> wait(std::chrono::milliseconds timeout);

 private:
  struct Member {
    std::vector<void*> sockets;  // none if it is another descriptor
    std::vector<int> fds;
    bool is_used = false;
  };

  Result<uint64_t> add(Member member);
  Result<bool> has_input(const Member& member) const;

  const FileDescriptor epoll_;
  std::map<uint64_t, Member> members_;
  std::vector<uint64_t> used_;  // each once
  std::vector<uint64_t> told_;
  uint64_t next_tag_ = 1;
};

}  // namespace penstock::net
