// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the thread that makes a pool worker's batches gets its work, and delivers the results: the other side of
// maker.h.

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

// For the thread that makes batches, except for drain(), which is for any thread.
class WorkSource {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  WorkSource() = default;
  WorkSource(const WorkSource&) = delete;
  WorkSource& operator=(const WorkSource&) = delete;
  virtual ~WorkSource() = default;

  // The next unit of work. kTimeout at the deadline; the reason why the server ended, once it has. Blocks.
  virtual Result<std::shared_ptr<const PoolWork>> next(Deadline deadline) = 0;
  // Delivers the result of the current work. A second result is dropped: a signal handler of the dataset may raise just
  // after the first.
  virtual void finish(PoolResult result) = 0;
  // A blob needed for the current work. kTimeout at the deadline, after which the caller requests the same blob again;
  // kClosed when the work is no longer wanted. Blocks.
  virtual Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) = 0;
  virtual bool is_wanted() const = 0;
  // No more work is wanted; next() ends once all started work has been taken.
  virtual void drain() = 0;
  // Human-readable notices, in chronological order.
  virtual std::vector<std::string> take_notices() = 0;
  virtual Standing standing() const = 0;
};

}  // namespace penstock::server
