// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end of a job's process in its server's channel (server/job_host.h): requests come in, and batches are named to
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

  // Before the first batch: where the batches lie, which outlives this.
  void set_slabs(shm::SlabPool& slabs) { slabs_ = &slabs; }

  int fd() const { return channel_.fd(); }

  // kClosed once the server has hung up: the job is over.
  Result<std::shared_ptr<const server::PoolWork>> next(Deadline deadline) override;
  // Work that is handed back ends this process: it is the process that can make nothing any more.
  void finish(server::PoolResult result) override;
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) override;
  bool is_wanted() const override;
  void drain() override {}  // the server is told to, and not the process of a job
  std::vector<std::string> take_notices() override { return {}; }
  server::Standing standing() const override { return {.trainer_id = trainer_id_}; }

 private:
  // Work that came while other work was in hand.
  struct Ahead {
    server::PoolWork work;
    bool is_wanted = true;
  };

  Result<void> send(server::PoolResult& result);
  std::shared_ptr<const server::PoolWork> begin(server::PoolWork work);
  // Takes all that has come, without waiting.
  Result<void> take_all() const;
  Result<void> take(const shm::Channel::Message& message) const;

  mutable shm::Channel channel_;
  shm::SlabPool* slabs_ = nullptr;
  uint64_t trainer_id_ = 0;
  wire::BatchKey key_{};             // of the work in hand
  mutable std::deque<Ahead> ahead_;  // in the order in which it is to be made
  Deadline children_look_at_{};      // at those that have ended
  bool is_in_hand_ = false;
  mutable bool is_wanted_ = false;
  std::optional<wire::BlobId> wished_;
  mutable std::optional<Result<std::vector<std::byte>>> arrived_;  // of the blob that is wished for
};

}  // namespace penstock::worker
