// SPDX-License-Identifier: Apache-2.0
#pragma once
// The job process's end of the channel to its server (server/job_host.h): it receives requests, and names batches to
// the server as slabs of this process's memory.

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "server/pool_work.h"
#include "server/work_source.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/blob_record.h"
#include "wire/job_record.h"

namespace penstock::worker {

// Confined to the thread that makes batches.
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
  Deadline children_look_at_{};      // time of the next check for ended children
  bool is_in_hand_ = false;
  mutable bool is_wanted_ = false;
  std::optional<wire::BlobId> wished_;
  mutable std::optional<Result<std::vector<std::byte>>> arrived_;  // of the requested blob
};

}  // namespace penstock::worker
