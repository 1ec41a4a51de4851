// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batch server of a job process: its work is sent by the server that it was forked for, and it has neither keys nor
// sockets of its pool.

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/file_descriptor.h"
#include "worker/batch_server.h"
#include "worker/job_channel.h"

namespace penstock::worker {

// The members that must outlive the base that takes work from them.
struct OwnJobChannel {
  explicit OwnJobChannel(FileDescriptor socket) : channel(std::move(socket)) {}

  JobChannel channel;
  const std::atomic<bool> is_closing{false};  // never true: the server ends a process that does not exit by itself
};

// Like its base: confined to the thread that makes batches.
class JobServer : private OwnJobChannel, public BatchServer {
 public:
  // Takes ownership of this process's end of the channel. `arena_bytes` is the cap of its lasting arena.
  JobServer(FileDescriptor socket, uint64_t arena_bytes)
      : OwnJobChannel(std::move(socket)),
        BatchServer(
            channel,
            {.arena_bytes = arena_bytes, .prefetch_factor = kBatchesAhead + uint32_t{kKeptBatchesMax}, .waits = true},
            is_closing) {
    channel.set_slabs(pool());
  }
};

}  // namespace penstock::worker
