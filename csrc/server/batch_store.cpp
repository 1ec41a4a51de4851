// SPDX-License-Identifier: Apache-2.0
#include "server/batch_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int kCompleteSeals = F_SEAL_WRITE | F_SEAL_SEAL;

Fault no_memory(uint64_t bytes, const std::string& what) {
  return {Errc::kNoMemory, "insufficient memory to keep a batch of " + std::to_string(bytes) + " bytes: " + what +
                               " failed (" + std::strerror(errno) + ")"};
}

Result<FileDescriptor> open_file(uint64_t bytes) {
  FileDescriptor file(::memfd_create("penstock-kept", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return no_memory(bytes, "memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return no_memory(bytes, "ftruncate");
  if (::fcntl(file.get(), F_ADD_SEALS, kSizeSeals) != 0) return no_memory(bytes, "sealing its size");
  return file;
}

// Writing allocates the memory, so that its lack is an error here and not a signal at the first access.
Result<void> write_at(int file, std::span<const std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return no_memory(bytes.size(), "writing");
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return {};
}

// Kept files may use half of the descriptors of this process. Descriptors are assigned from the lowest number.
bool is_scarce(int fd) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && static_cast<rlim_t>(fd) >= limit.rlim_cur / 2;
}

}  // namespace

Result<FileDescriptor> file_of(std::span<const std::byte> bytes) {
  auto file = open_file(bytes.size());
  if (!file) return file.error();
  if (auto written = write_at(file.value().get(), bytes, 0); !written) return written.error();
  if (::fcntl(file.value().get(), F_ADD_SEALS, kCompleteSeals) != 0) return no_memory(bytes.size(), "sealing");
  return file;
}

Result<std::unique_ptr<KeptBatch>> KeptBatch::of_size(uint64_t payload_bytes, uint32_t record_bytes, Form form) {
  if (form == Form::kShared) {
    auto file = open_file(payload_bytes);
    if (!file) return file.error();
    return std::unique_ptr<KeptBatch>(new KeptBatch(std::move(file).value(), nullptr, payload_bytes, record_bytes));
  }
  void* const memory =
      ::mmap(nullptr, std::max<uint64_t>(payload_bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return no_memory(payload_bytes, "mmap");
  std::unique_ptr<KeptBatch> batch(
      new KeptBatch(FileDescriptor(), static_cast<std::byte*>(memory), payload_bytes, record_bytes));
  batch->hold({batch->memory_, payload_bytes}, record_bytes);
  return batch;
}

Result<std::unique_ptr<KeptBatch>> KeptBatch::of_file(FileDescriptor file, uint64_t payload_bytes,
                                                      uint32_t record_bytes) {
  constexpr int kSeals = kSizeSeals | F_SEAL_WRITE;
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(file.get(), &status) != 0 ||
      static_cast<uint64_t>(status.st_size) != payload_bytes)
    return Fault{Errc::kMalformed, "the file of a kept batch is not sealed, or has another size than its batch"};
  std::unique_ptr<KeptBatch> batch(new KeptBatch(std::move(file), nullptr, payload_bytes, record_bytes));
  if (auto mapped = batch->map_file(); !mapped) return mapped.error();
  return batch;
}

KeptBatch::KeptBatch(FileDescriptor file, std::byte* memory, uint64_t payload_bytes, uint32_t record_bytes)
    : file_(std::move(file)), memory_(memory), bytes_(payload_bytes), record_bytes_(record_bytes) {}

KeptBatch::~KeptBatch() {
  if (memory_ != nullptr) ::munmap(memory_, std::max<uint64_t>(bytes_, 1));
}

// A private mapping, since a file that is sealed against writing cannot be mapped as a shared one before Linux 6.7.
Result<void> KeptBatch::map_file() {
  void* const memory = ::mmap(nullptr, std::max<uint64_t>(bytes_, 1), PROT_READ, MAP_PRIVATE, file_.get(), 0);
  if (memory == MAP_FAILED) return no_memory(bytes_, "mmap");
  memory_ = static_cast<std::byte*>(memory);
  hold({memory_, bytes_}, record_bytes_);
  if (is_scarce(file_.get())) file_ = FileDescriptor();
  return {};
}

Result<bool> KeptBatch::copy_step(std::span<const std::byte> source) {
  PENSTOCK_ASSERT(source.size() == bytes_, "another batch is copied");
  const auto step = source.subspan(copied_, std::min<uint64_t>(kKeepStepBytes, source.size() - copied_));
  if (!file_) {
    if (!step.empty()) std::memcpy(memory_ + copied_, step.data(), step.size());
  } else if (auto written = write_at(file_.get(), step, copied_); !written) {
    return written.error();
  }
  copied_ += step.size();
  if (copied_ < source.size()) return false;
  if (!file_) return true;
  if (::fcntl(file_.get(), F_ADD_SEALS, kCompleteSeals) != 0) return no_memory(bytes_, "sealing");
  if (auto mapped = map_file(); !mapped) return mapped.error();
  return true;
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
  Answer answer{.kind = found.kind, .is_sparse = found.is_sparse};
  if (found.kind == Found::Kind::kKept) answer.result = batches_.at(found.id);
  return answer;
}

bool BatchStore::is_passed_over(const BatchName& name) const {
  MutexLock lock(mutex_);
  return names_.is_passed_over(name);
}

void BatchStore::stop_waiting(uint64_t worker_id) {
  MutexLock lock(mutex_);
  names_.stop_waiting(worker_id);
}

BatchStore::Answer BatchStore::ask_ahead(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  // Another worker's request that waits would wait longer, and a batch that is there, or soon will be, is not made.
  if (names_.is_awaited(name.group)) return {.kind = Found::Kind::kWait};
  const Found found = names_.ask(name, by, /*may_wait=*/false, clock_now());
  return {.kind = found.kind == Found::Kind::kMake ? Found::Kind::kMake : Found::Kind::kWait,
          .is_sparse = found.is_sparse};
}

std::shared_ptr<const PoolResult> BatchStore::twin_of(const BatchName& name) const {
  MutexLock lock(mutex_);
  const auto id = names_.twin_of(name);
  return id ? batches_.at(*id) : nullptr;
}

std::optional<BatchStore::Id> BatchStore::admit(const BatchName& name, const Claimant& by, session::MadeBatch batch,
                                                std::optional<Comparison> comparison) {
  MutexLock lock(mutex_);
  if (comparison) names_.note_comparison(name, *comparison);
  batch.bytes = page_bytes(batch.bytes);
  const auto admission = names_.admit(name, by, batch, clock_now());
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
