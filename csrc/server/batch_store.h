// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batches that the workers of one server keep for requests of the same name: the memory and the lock around
// session/named_batches.h. KeptBatch is a copy of a batch in the server's own memory, which neither the job's process
// nor its end affects. machine_store.h shares them with the other servers of the machine.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "server/maker.h"
#include "session/named_batches.h"

namespace penstock::server {

// The bytes of a batch that are copied in one turn of an I/O thread.
constexpr uint64_t kKeepStepBytes = uint64_t{32} << 20;
// The part of the machine's memory that stays free for other purposes: below it, kept batches are dropped.
constexpr uint64_t kMemoryReserveParts = 16;

// Whether two sealed batches have the same values: kUnclear if their tensors are written in different forms.
session::NamedBatches::Comparison compare_batches(const HeldBatch& one, const HeldBatch& other);

// A sealed file in memory with these bytes. kNoMemory.
Result<FileDescriptor> file_of(std::span<const std::byte> bytes);

// A copy of a batch, filled step by step: in anonymous memory or, to be shared with other servers, in a file in memory
// that is sealed once it is complete.
class KeptBatch final : public HeldBatch {
 public:
  enum class Form : uint8_t { kPrivate, kShared };
  // kNoMemory.
  static Result<std::unique_ptr<KeptBatch>> of_size(uint64_t payload_bytes, uint32_t record_bytes,
                                                    Form form = Form::kPrivate);
  // A batch that another server has copied. kMalformed for a file that is not sealed, or has another size.
  static Result<std::unique_ptr<KeptBatch>> of_file(FileDescriptor file, uint64_t payload_bytes, uint32_t record_bytes);
  ~KeptBatch() override;

  // Copies the next kKeepStepBytes of `source`. Returns true once it has all of them; only then there is a payload.
  // kNoMemory.
  Result<bool> copy_step(std::span<const std::byte> source);
  // The sealed file; -1 without one.
  int file() const { return file_.get(); }

 private:
  KeptBatch(FileDescriptor file, std::byte* memory, uint64_t payload_bytes, uint32_t record_bytes);

  Result<void> map_file();

  FileDescriptor file_;
  std::byte* memory_;  // null until the file is complete
  const uint64_t bytes_;
  const uint32_t record_bytes_;
  uint64_t copied_ = 0;
};

// Thread-safe.
class BatchStore {
 public:
  using Found = session::NamedBatches::Found;
  using Id = session::NamedBatches::Id;

  // A worker's I/O thread. `wake` makes it take a turn; it is called until leave().
  void join(uint64_t worker_id, std::function<void()> wake);
  void leave(uint64_t worker_id);
  // The worker's share of the bytes that the pool keeps; the budget is the sum of the shares.
  void set_share(uint64_t worker_id, uint64_t bytes);
  // A new reading of the use of the machine's memory.
  void note_memory(const wire::HostLoad& load);
  // Whether anything is kept.
  bool is_on() const { return is_on_; }

  struct Answer {
    Found::Kind kind = Found::Kind::kMake;
    std::shared_ptr<const PoolResult> result{};  // of kKept
    bool is_sparse = false;                      // as in Found
  };
  Answer ask(const session::BatchName& name, const session::Claimant& by, bool may_wait);
  // Whether a job's process may have the request for this batch before it can make it: kMake, which claims the batch,
  // or kWait.
  Answer ask_ahead(const session::BatchName& name, const session::Claimant& by);
  bool is_passed_over(const session::BatchName& name) const;
  void stop_waiting(uint64_t worker_id);
  // The batch with which the one just made has to be compared before it is admitted; null: none.
  std::shared_ptr<const PoolResult> twin_of(const session::BatchName& name) const;
  // A batch was made. If it is to be kept, the caller copies it and calls settle() or drop().
  std::optional<Id> admit(const session::BatchName& name, const session::Claimant& by, session::MadeBatch batch,
                          std::optional<session::NamedBatches::Comparison> comparison);
  void settle(Id id, std::shared_ptr<const PoolResult> result);
  void drop(Id id);
  void release(const session::BatchName& name, const session::Claimant& by);
  void refuse(const session::BatchName& name, const session::Claimant& by);
  uint64_t bytes_made_by(uint64_t worker_id) const;

 private:
  struct Member {
    std::function<void()> wake;
    uint64_t share = 0;
  };

  void let_go(std::span<const Id> ids) PENSTOCK_REQUIRES(mutex_);
  void fit() PENSTOCK_REQUIRES(mutex_);
  void wake_others(uint64_t worker_id) PENSTOCK_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<uint64_t, Member> members_ PENSTOCK_GUARDED_BY(mutex_);
  session::NamedBatches names_ PENSTOCK_GUARDED_BY(mutex_);
  std::unordered_map<Id, std::shared_ptr<const PoolResult>> batches_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<uint64_t> memory_room_ PENSTOCK_GUARDED_BY(mutex_);  // for kept batches; empty: unknown
  std::atomic<bool> is_on_{false};
};

}  // namespace penstock::server
