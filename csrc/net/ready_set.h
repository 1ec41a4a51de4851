// SPDX-License-Identifier: Apache-2.0
#pragma once
// Waiting for many ZeroMQ sockets of which few have an event at a time. Each is added once, so the cost of a wait grows
// with the number of events and not of sockets.
//
// A socket's descriptor (ZMQ_FD) signals that an event occurred, and not that a message waits. Each use of the socket
// consumes the signal: after receiving the first of several messages, or sending one, the descriptor may be silent
// while messages wait. It is reliable from the moment that ZMQ_EVENTS reports no waiting message until the next use of
// the socket: a message that arrives in that time makes it readable.
//
// Invariant: `wait` sleeps only if every socket was queried for its events after its last use, and none had a message.
// The following count as used: newly added sockets, sockets that the last `wait` returned, and sockets marked as used.
// Only these are queried.

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

  // Adds sockets that are served together, or a plain descriptor. Returns the tag by which `wait` reports them; tags
  // are never reused.
  Result<uint64_t> add(std::span<const Waitable> sockets);
  Result<uint64_t> add(int fd);

  // Whether `wait` also reports this plain descriptor when it is writable.
  Result<void> watch_output(uint64_t tag, bool is_watched);

  // Call it before the first of them is closed: the number of a closed descriptor is soon reused. Closing does not
  // remove it, as libzmq closes it later, and a forked child may have a copy.
  void remove(uint64_t tag);

  // Marks the sockets of this tag as used although the last `wait` did not report them, usually because of a send.
  void mark_used(uint64_t tag);

  // Waits until a socket may be readable, or `timeout` passes (negative: forever). Blocks. Returns tags, each once,
  // valid until the next call. A socket that was not read completely is returned again by the next call, in addition to
  // sockets that have become readable since. A signal ends the wait early.
  Result<std::span<const uint64_t>> wait(std::chrono::milliseconds timeout);

 private:
  struct Member {
    std::vector<void*> sockets;  // none for a plain descriptor
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
