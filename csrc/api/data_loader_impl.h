// SPDX-License-Identifier: Apache-2.0
#pragma once
// DataLoader::Impl is the implementation of penstock::DataLoader: its workers, stream, epochs and position. The public
// functions of DataLoader and its iterator are implemented here, too.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/commit_ledger.h"
#include "api/index_order.h"
#include "api/loader_state.h"
#include "api/worker_set.h"
#include "base/process.h"
#include "loader/stream.h"
#include "penstock/data_loader.h"

namespace penstock {

// Thread-compatible: for one thread of the trainer.
class PENSTOCK_HIDDEN DataLoader::Impl {
 public:
  Impl(AnyDataset dataset, Options options);

  void begin_epoch();
  // Throws Error kUnsupported without Options::commit.
  void begin_redelivery();
  std::optional<Batch> next();
  void commit(const Batch& batch);
  void commit(const BatchId& id);
  std::vector<BatchId> outstanding() const;
  // Throws Error kUnsupported without Options::commit; `call` is the program's.
  api::CommitLedger& commits(const char* call) const;
  // Counts started epochs, so that an iterator can check whether its epoch is still the current one.
  uint64_t begun_count() const { return begun_count_; }

  std::optional<int64_t> size() const;
  Value state() const;
  void load_state(const Value& state);
  // `state` is where to continue; null: at the current position.
  void reshard(api::JobPlace job, const Value* state);
  Stats stats() const;

  const Options& options() const { return options_; }
  // Shared with the modules offloaded to these workers, which may outlive the loader.
  const std::shared_ptr<api::WorkerSet>& workers() const { return (*running_)->workers; }

 private:
  // The state that belongs to the process that created the loader. The stream exists from the first epoch on.
  struct Running {
    std::shared_ptr<api::WorkerSet> workers;
    std::unique_ptr<loader::Stream> stream;
  };

  Running& running();
  void check_owner() const;
  void check_can_resume(const char* call) const;
  bool has_free_order() const;
  bool begin_part();
  void begin_repeat(api::CommitLedger::Repeat repeat);
  void begin_fresh();
  void begin_from(const api::LoadedState& loaded);
  void begin(api::EpochAccount account, const api::ResumePoint* point);
  void begin_meter(api::StepMeter& meter);
  std::optional<Batch> next_of_part();
  std::optional<Batch> take();
  Batch to_batch(loader::Client::Event& event);

  Options options_;  // reshard() changes its ranks
  api::BuiltLoader built_;
  std::optional<ProcessBound<Running>> running_;
  std::shared_ptr<api::CommitLedger> commits_;  // if the program commits batches; batches know it, too
  std::optional<api::EpochAccount> account_;
  bool has_epoch_to_come_ = false;  // after batches of earlier epochs
  bool is_over_ = false;            // there was nothing to redeliver
  std::optional<Value> loaded_state_;
  int64_t epoch_count_ = 0;
  uint64_t begun_count_ = 0;
};

// The library's access to the internals of a loader.
struct LoaderAccess {
  static const std::shared_ptr<api::WorkerSet>& workers_of(const DataLoader& loader) { return loader.impl_->workers(); }
};

}  // namespace penstock
