// SPDX-License-Identifier: Apache-2.0
#include "server/batch_store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "wire/frame.h"

namespace penstock::server {

using session::BatchName;
using session::Claimant;
using Comparison = session::NamedBatches::Comparison;

Comparison compare_batches(const HeldBatch& one, const HeldBatch& other) {
  const auto frame_of = [](const HeldBatch& batch) {
    return wire::parse_frame(batch.payload().last(batch.record_bytes()));
  };
  const auto first = frame_of(one);
  const auto second = frame_of(other);
  if (!first || !second) return Comparison::kUnclear;
  const wire::Frame& a = first.value();
  const wire::Frame& b = second.value();
  if (!std::ranges::equal(a.nest, b.nest) || a.tensors.size() != b.tensors.size()) return Comparison::kDifferent;
  for (size_t index = 0; index < a.tensors.size(); ++index) {
    const wire::TensorEntry& mine = a.tensors[index];
    const wire::TensorEntry& theirs = b.tensors[index];
    if (mine.dtype != theirs.dtype || mine.shape != theirs.shape) return Comparison::kDifferent;
    const bool is_comparable = mine.encoding == theirs.encoding && mine.bytes == theirs.bytes &&
                               mine.strides == theirs.strides && mine.encoding != wire::Encoding::kWithheld &&
                               mine.encoding != wire::Encoding::kShared;
    if (!is_comparable) return Comparison::kUnclear;
    const auto is_inside = [&](const wire::TensorEntry& entry, const HeldBatch& batch) {
      return entry.offset <= batch.payload().size() && entry.bytes <= batch.payload().size() - entry.offset;
    };
    if (!is_inside(mine, one) || !is_inside(theirs, other)) return Comparison::kUnclear;
    const bool is_same = mine.bytes == 0 || std::memcmp(one.payload().data() + mine.offset,
                                                        other.payload().data() + theirs.offset, mine.bytes) == 0;
    if (!is_same) return wire::is_narrow(mine.encoding) ? Comparison::kUnclear : Comparison::kDifferent;
  }
  return Comparison::kEqual;
}

// ---- KeptBatch

Result<std::unique_ptr<KeptBatch>> KeptBatch::of_size(uint64_t payload_bytes, uint32_t record_bytes) {
  void* const memory =
      ::mmap(nullptr, std::max<uint64_t>(payload_bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return Fault{Errc::kNoMemory, "insufficient memory to keep a batch of " + std::to_string(payload_bytes) + " bytes"};
  return std::unique_ptr<KeptBatch>(new KeptBatch(static_cast<std::byte*>(memory), payload_bytes, record_bytes));
}

KeptBatch::KeptBatch(std::byte* memory, uint64_t payload_bytes, uint32_t record_bytes) : memory_(memory) {
  hold({memory_, payload_bytes}, record_bytes);
}

KeptBatch::~KeptBatch() { ::munmap(memory_, std::max<uint64_t>(payload().size(), 1)); }

bool KeptBatch::copy_step(std::span<const std::byte> source) {
  PENSTOCK_ASSERT(source.size() == payload().size(), "another batch is copied");
  const uint64_t bytes = std::min<uint64_t>(kKeepStepBytes, source.size() - copied_);
  if (bytes > 0) std::memcpy(memory_ + copied_, source.data() + copied_, bytes);
  copied_ += bytes;
  return copied_ == source.size();
}

// ---- BatchStore

namespace {

// The memory of so many bytes, in whole pages.
uint64_t page_bytes(uint64_t bytes) {
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

void BatchStore::join(uint64_t worker_id, std::function<void()> wake) {
  MutexLock lock(mutex_);
  members_[worker_id].wake = std::move(wake);
}

void BatchStore::leave(uint64_t worker_id) {
  MutexLock lock(mutex_);
  if (members_.erase(worker_id) == 0) return;
  let_go(names_.leave(worker_id));
  fit();
  wake_others(worker_id);
}

void BatchStore::set_share(uint64_t worker_id, uint64_t bytes) {
  MutexLock lock(mutex_);
  const auto member = members_.find(worker_id);
  if (member == members_.end() || member->second.share == bytes) return;
  member->second.share = bytes;
  fit();
}

void BatchStore::note_memory(const wire::HostLoad& load) {
  if (load.memory_bytes == 0) return;
  const uint64_t taken = load.memory_used_bytes + load.memory_bytes / kMemoryReserveParts;
  MutexLock lock(mutex_);
  // Used memory includes the kept batches.
  const uint64_t kept = names_.bytes();
  const uint64_t others = taken > kept ? taken - kept : 0;
  memory_room_ = load.memory_bytes > others ? load.memory_bytes - others : 0;
  fit();
}

void BatchStore::fit() {
  uint64_t budget = 0;
  for (const auto& [id, member] : members_) budget += member.share;
  is_on_ = budget > 0;
  // A budget of 0 would end the claims, too.
  if (memory_room_ && budget > 0) budget = std::max<uint64_t>(1, std::min(budget, *memory_room_));
  if (budget != names_.budget()) let_go(names_.set_budget(budget, clock_now()));
}

void BatchStore::let_go(std::span<const Id> ids) {
  for (const Id id : ids) batches_.erase(id);
}

void BatchStore::wake_others(uint64_t worker_id) {
  for (const auto& [id, member] : members_)
    if (id != worker_id) member.wake();
}

BatchStore::Answer BatchStore::ask(const BatchName& name, const Claimant& by, bool may_wait) {
  MutexLock lock(mutex_);
  const Found found = names_.ask(name, by, may_wait, clock_now());
  Answer answer{.kind = found.kind};
  if (found.kind == Found::Kind::kKept) answer.result = batches_.at(found.id);
  return answer;
}

void BatchStore::stop_waiting(uint64_t worker_id) {
  MutexLock lock(mutex_);
  names_.stop_waiting(worker_id);
}

bool BatchStore::is_awaited(const std::string& group) const {
  MutexLock lock(mutex_);
  return names_.is_awaited(group);
}

std::optional<BatchStore::Id> BatchStore::admit(const BatchName& name, const Claimant& by, const PoolResult& result) {
  std::shared_ptr<const PoolResult> twin;
  {
    MutexLock lock(mutex_);
    if (const auto id = names_.twin_of(name)) twin = batches_.at(*id);
  }
  std::optional<Comparison> comparison;
  if (twin) comparison = result.draws_nothing ? compare_batches(*twin->batch, *result.batch) : Comparison::kDifferent;
  MutexLock lock(mutex_);
  if (comparison) names_.note_comparison(name, *comparison);
  const auto admission =
      names_.admit(name, by, page_bytes(result.batch->payload().size()), result.draws_nothing, clock_now());
  let_go(admission.evicted);
  if (!admission.id) wake_others(by.worker_id);
  return admission.id;
}

void BatchStore::settle(Id id, std::shared_ptr<const PoolResult> result) {
  MutexLock lock(mutex_);
  if (names_.settle(id)) batches_.emplace(id, std::move(result));
  wake_others(0);
}

void BatchStore::drop(Id id) {
  MutexLock lock(mutex_);
  names_.drop(id);
  wake_others(0);
}

void BatchStore::release(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  names_.release(name, by);
  wake_others(by.worker_id);
}

void BatchStore::refuse(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  names_.refuse(name, by, clock_now());
  wake_others(by.worker_id);
}

uint64_t BatchStore::bytes_made_by(uint64_t worker_id) const {
  MutexLock lock(mutex_);
  return names_.bytes_made_by(worker_id);
}

}  // namespace penstock::server
