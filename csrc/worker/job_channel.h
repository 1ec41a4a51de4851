// SPDX-License-Identifier: Apache-2.0
#pragma once
// A job process's side of its server (server/job_host.h): JobChannel is its end of the channel, and JobServer the batch
// server over it.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "server/maker.h"
#include "server/work_exchange.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/blob_record.h"
#include "wire/job_record.h"
#include "worker/batch_server.h"

namespace penstock::worker {

// The job process's end of the channel to its server: it receives requests, and names batches to the server as slabs of
// this process's memory. Confined to the thread that makes batches.
class JobChannel final : public server::WorkSource {
 public:
  explicit JobChannel(FileDescriptor socket) : channel_(std::move(socket)) {}

  // Call before the first batch. `slabs` contains the batches and must outlive this object.
  void set_slabs(shm::SlabPool& slabs) { slabs_ = &slabs; }

  int fd() const { return channel_.fd(); }

  // kClosed once the server has hung up: the job is over.
  Result<std::shared_ptr<const server::PoolWork>> next(Deadline deadline) override;
  // Handing work back ends this process: it can make no more batches.
  void finish(server::PoolResult result) override;
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) override;
  bool is_wanted() const override;
  void drain() override {}  // the server is drained, not the process of a job
  std::vector<std::string> take_notices() override { return {}; }
  server::Standing standing() const override { return {.trainer_id = trainer_id_}; }

 private:
  // Work that arrived during other work.
  struct Ahead {
    server::PoolWork work;
    bool is_wanted = true;
  };

  Result<void> send(server::PoolResult& result);
  std::shared_ptr<const server::PoolWork> begin(server::PoolWork work);
  // Takes all messages received so far, without waiting.
  Result<void> take_all() const;
  Result<void> take(const shm::Channel::Message& message) const;

  mutable shm::Channel channel_;
  shm::SlabPool* slabs_ = nullptr;
  uint64_t trainer_id_ = 0;
  wire::BatchKey key_{};             // of the current work
  mutable std::deque<Ahead> ahead_;  // in processing order
  Deadline children_check_at_{};     // time of the next check for ended children
  bool is_in_hand_ = false;
  mutable bool is_wanted_ = false;
  std::optional<wire::BlobId> requested_blob_;
  mutable std::optional<Result<std::vector<std::byte>>> arrived_;  // of the requested blob
};

// The members that must outlive the base that takes work from them.
struct OwnJobChannel {
  explicit OwnJobChannel(FileDescriptor socket) : channel(std::move(socket)) {}

  JobChannel channel;
  const std::atomic<bool> is_closing{false};  // never true: the server ends a process that does not exit by itself
};

// The batch server of a job process: its work is sent by the server that it was forked for, and it has neither keys nor
// sockets of its pool.
//
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
