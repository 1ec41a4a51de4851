// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes batches in a thread: reads the dataset's samples, then runs the transform and the prefixes of offloaded
// modules.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "api/batch_transform.h"
#include "api/told_threads.h"
#include "dataset/batch_reader.h"
#include "loader/recycled_memory.h"
#include "loader/thread_source.h"
#include "worker/prefix_stage.h"

namespace penstock::api {

// Confined to its thread.
class ThreadMaker final : public loader::ThreadMaker {
 public:
  // Shared with the other threads and with the trainer.
  struct Shared {
    std::shared_ptr<loader::RecycledMemory> memory;
    std::shared_ptr<SharedPrefixes> prefixes;
    std::shared_ptr<SharedStarts> starts;
  };

  ThreadMaker(std::unique_ptr<dataset::BatchReader> reader, std::optional<BatchTransform> transform, Shared shared);

  std::string in_hand() const override { return reader_->in_hand(); }
  Made make(const session::RequestContent& content, const wire::EpochSeeds& seeds) override;

 private:
  std::optional<Value> read(const session::RequestContent& content, const wire::EpochSeeds& seeds);
  void run_prefixes(const wire::BatchRequest& request, Made& made);

  std::unique_ptr<dataset::BatchReader> reader_;
  std::optional<BatchTransform> transform_;
  Shared shared_;
  worker::PrefixStage prefixes_;
  uint64_t prefix_version_ = 0;
  bool has_prefixes_ = false;
};

}  // namespace penstock::api
