// SPDX-License-Identifier: Apache-2.0
#pragma once
// One of the stages that a batch goes through between its arrival and the trainer (stage_chain.h): it is copied to
// pinned memory (pin_stage.h), or to a device (copy_stage.h).

#include <cstddef>

#include "base/result.h"
#include "base/waker.h"
#include "loader/batch.h"

namespace penstock::loader {

// finish() is for the trainer's thread, takes_narrow() for any, the rest for the chain's.
class BatchStage {
 public:
  BatchStage() = default;
  BatchStage(const BatchStage&) = delete;
  BatchStage& operator=(const BatchStage&) = delete;
  virtual ~BatchStage() = default;

  // On return the batch has its final tensors, though a device may still be filling them. kNoMemory leaves the batch as
  // it was, for another attempt. After another error the batch is to be dropped, which gives no memory back that is
  // still read.
  virtual Result<void> begin(Batch& batch) = 0;

  // The trainer is about to be given the batch: what it does with the tensors from now on comes after their copy.
  virtual Result<void> finish(Batch& batch) = 0;

  // Whether begin() takes batches with tensors that were left as they came (Batch::try_keep_narrow).
  virtual bool takes_narrow() const = 0;

  // Gives back the memory that copies have read. Returns how many are still under way.
  virtual size_t reclaim() = 0;

  // Before the first batch: `waker` wakes the chain's thread for a reclaim() until the stage is destroyed.
  virtual void set_waker(Waker&) {}
};

}  // namespace penstock::loader
