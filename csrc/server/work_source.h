// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the thread that makes a pool's worker's batches gets its work, and hands over what it made of it: the other
// side of maker.h.

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/maker.h"
#include "server/pool_work.h"
#include "wire/blob_record.h"

namespace penstock::server {

// For the thread that makes batches, but for drain(), which is for any.
class WorkSource {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  WorkSource() = default;
  WorkSource(const WorkSource&) = delete;
  WorkSource& operator=(const WorkSource&) = delete;
  virtual ~WorkSource() = default;

  // The next piece of work. kTimeout at the deadline; why the server ended once it has. Blocks.
  virtual Result<std::shared_ptr<const PoolWork>> next(Deadline deadline) = 0;
  // Hands over the result of the work in hand. A second one is dropped: a dataset's signal handler may raise just
  // behind the first.
  virtual void finish(PoolResult result) = 0;
  // A blob that the work in hand is made with. kTimeout at the deadline, after which the same is asked for again;
  // kClosed when the work is not wanted any more. Blocks.
  virtual Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) = 0;
  virtual bool is_wanted() const = 0;
  // No more work is wanted; next() ends once all that was begun has been taken.
  virtual void drain() = 0;
  // News for people, in the order in which it happened.
  virtual std::vector<std::string> take_notices() = 0;
  virtual Standing standing() const = 0;
};

}  // namespace penstock::server
