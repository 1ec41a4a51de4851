// SPDX-License-Identifier: Apache-2.0
#include "shm/sample_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "cache/fill_once.h"

namespace penstock::shm {
namespace {

constexpr uint64_t kStoreMagic = 0x3230'5353'4e50;  // not on any wire
constexpr uint32_t kWriterCount = 1024;             // threads that write at a time; others do not store their sample
// After so many missed samples, at least this share must be among the samples that are kept.
constexpr uint64_t kMissedMin = 256;
constexpr double kKeptShareMin = 0.4;
constexpr int kStoreSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The state of an entry: its kind, the writer that has claimed it, and a number that every change increments.
constexpr uint64_t kEmpty = 0, kClaimed = 1, kReady = 2, kBarred = 3;
constexpr uint32_t kWriterShift = 2, kNumberShift = 12;
static_assert(kWriterCount == 1 << (kNumberShift - kWriterShift));

constexpr uint64_t kind_of(uint64_t state) { return state & 3; }
constexpr uint32_t writer_of(uint64_t state) { return state >> kWriterShift & (kWriterCount - 1); }
constexpr uint64_t changed(uint64_t state, uint64_t kind, uint32_t writer = 0) {
  return ((state >> kNumberShift) + 1) << kNumberShift | uint64_t{writer} << kWriterShift | kind;
}

uint64_t page_size() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

Fault no_store(const std::string& what, int error_number) {
  return {Errc::kNoMemory, "memory for cached samples could not be allocated: " + what + ": " +
                               std::strerror(error_number) + "; lower memory="};
}

}  // namespace

struct SampleStore::Entry {
  std::atomic<uint64_t> state;
  std::atomic<uint64_t> place;     // of its bytes, within the bytes of all samples
  std::atomic<uint64_t> capacity;  // bytes admitted for it
  std::atomic<uint64_t> bytes;
};

struct alignas(64) SampleStore::Writer {
  pthread_mutex_t mutex;
  std::atomic<uint64_t> claimed;  // one more than the index of the entry that its thread claims; 0: none
};

struct alignas(64) SampleStore::Control {
  struct alignas(64) Counter {
    std::atomic<uint64_t> value;
  };

  uint64_t magic;
  uint64_t sample_count;
  uint64_t budget_bytes;
  uint64_t slab_place;
  std::atomic<uint64_t> is_exhausted;
  std::atomic<uint64_t> are_all_barred;
  // The samples that are kept; 0 and 0: all. Of the samples missed since they were set, how many, and how many of
  // these.
  std::atomic<uint64_t> kept_first;
  std::atomic<uint64_t> kept_end;
  std::atomic<uint64_t> missed;
  std::atomic<uint64_t> missed_kept;
  Counter admitted_bytes;
  Counter smallest_bytes;  // the size of the smallest sample so far, inverted, so that 0 stands for none
  std::array<Counter, kStoreCountKinds> counts;
};

Result<std::shared_ptr<SampleStore>> SampleStore::create(const SampleStoreSpec& spec) {
  if (spec.sample_count > kStoreSamplesMax || spec.budget_bytes > kStoreBytesMax) {
    return Fault{Errc::kTooLarge, "a cache of " + std::to_string(spec.budget_bytes) + " bytes for " +
                                      std::to_string(spec.sample_count) + " samples is above the cap of " +
                                      std::to_string(kStoreBytesMax) + " bytes and " +
                                      std::to_string(kStoreSamplesMax) + " samples; lower memory="};
  }
  const uint64_t table_bytes = sizeof(Control) + kWriterCount * sizeof(Writer) + spec.sample_count * sizeof(Entry);
  const uint64_t slab_place = align_up(table_bytes, page_size());
  const uint64_t bytes = slab_place + align_up(spec.budget_bytes, page_size());
  FileDescriptor fd(::memfd_create("penstock-samples", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return no_store("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    return no_store("a file of " + std::to_string(bytes) + " bytes", errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, kStoreSeals) != 0) return no_store("sealing the file", errno);
  if (const int error_number = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(slab_place)); error_number != 0)
    return no_store("the table of " + std::to_string(spec.sample_count) + " samples", error_number);
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base == MAP_FAILED) return no_store("mapping " + std::to_string(bytes) + " bytes", errno);
  // The memory is zero, which is the correct initial value of everything else.
  auto store = std::make_shared<SampleStore>(std::move(fd), static_cast<std::byte*>(base), bytes);
  store->control().sample_count = spec.sample_count;
  store->control().budget_bytes = spec.budget_bytes;
  store->control().slab_place = slab_place;
  store->control().magic = kStoreMagic;
  pthread_mutexattr_t kind;
  ::pthread_mutexattr_init(&kind);
  ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  for (uint32_t number = 0; number < kWriterCount; ++number) ::pthread_mutex_init(&store->writer(number).mutex, &kind);
  ::pthread_mutexattr_destroy(&kind);
  return store;
}

Result<std::shared_ptr<SampleStore>> SampleStore::attach(FileDescriptor fd) {
  const Fault bad{Errc::kMalformed,
                  "the memory of cached samples that another process passed cannot be used; the "
                  "processes of a job must run the same version of penstock"};
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0 || ::fcntl(fd.get(), F_GET_SEALS) != kStoreSeals) return bad;
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < sizeof(Control) + kWriterCount * sizeof(Writer)) return bad;
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base == MAP_FAILED) return no_store("mapping " + std::to_string(bytes) + " bytes", errno);
  auto store = std::make_shared<SampleStore>(std::move(fd), static_cast<std::byte*>(base), bytes);
  const Control& control = store->control();
  const uint64_t table_bytes = sizeof(Control) + kWriterCount * sizeof(Writer) + control.sample_count * sizeof(Entry);
  if (control.magic != kStoreMagic || control.sample_count > kStoreSamplesMax || control.slab_place < table_bytes ||
      control.slab_place > bytes || control.budget_bytes > bytes - control.slab_place)
    return bad;
  return store;
}

SampleStore::SampleStore(FileDescriptor fd, std::byte* base, uint64_t mapped_bytes)
    : fd_(std::move(fd)), base_(base), mapped_bytes_(mapped_bytes) {
  ::madvise(base_, mapped_bytes_, MADV_DONTDUMP);
}

SampleStore::~SampleStore() { ::munmap(base_, mapped_bytes_); }

SampleStore::Control& SampleStore::control() const { return *reinterpret_cast<Control*>(base_); }

SampleStore::Writer& SampleStore::writer(uint32_t number) const {
  return reinterpret_cast<Writer*>(base_ + sizeof(Control))[number];
}

SampleStore::Entry& SampleStore::entry(uint64_t index) const {
  PENSTOCK_ASSERT(index < control().sample_count, "sample ", index, " of ", control().sample_count);
  return reinterpret_cast<Entry*>(base_ + sizeof(Control) + kWriterCount * sizeof(Writer))[index];
}

uint64_t SampleStore::sample_count() const { return control().sample_count; }
uint64_t SampleStore::budget_bytes() const { return control().budget_bytes; }
bool SampleStore::is_exhausted() const { return control().is_exhausted.load(std::memory_order_relaxed) != 0; }

std::optional<SampleStore::Found> SampleStore::find(uint64_t index) const {
  if (are_all_barred()) return std::nullopt;
  const Entry& found = entry(index);
  // acquire: pairs with the release in release(), so the bytes were written.
  const uint64_t state = found.state.load(std::memory_order_acquire);
  if (kind_of(state) != kReady) return std::nullopt;
  const uint64_t place = found.place.load(std::memory_order_relaxed);
  const uint64_t bytes = found.bytes.load(std::memory_order_relaxed);
  // Damage to the table must not lead outside of the memory.
  const bool fits = bytes <= control().budget_bytes && place <= control().budget_bytes - bytes;
  if (!fits) return Found{.bytes = {}, .state = state};
  return Found{.bytes = {base_ + control().slab_place + place, bytes}, .state = state};
}

void SampleStore::drop(uint64_t index, const Found& found) {
  uint64_t state = found.state;
  if (entry(index).state.compare_exchange_strong(state, changed(state, kEmpty))) count(StoreCount::kDamaged);
}

SampleStore::Contents SampleStore::contents() const {
  Contents found;
  for (uint64_t index = 0; index < control().sample_count; ++index) {
    const uint64_t kind = kind_of(entry(index).state.load(std::memory_order_relaxed));
    found.barred_count += kind == kBarred;
    if (kind != kReady) continue;
    ++found.sample_count;
    found.bytes += entry(index).bytes.load(std::memory_order_relaxed);
  }
  return found;
}

bool SampleStore::has_room(uint64_t index) const {
  if (is_exhausted() || are_all_barred()) return false;
  if (entry(index).capacity.load(std::memory_order_relaxed) > 0) return true;
  if (!keeps(index)) return false;
  const uint64_t smallest = ~control().smallest_bytes.value.load(std::memory_order_relaxed);
  const cache::FillOnce policy(control().admitted_bytes.value, control().budget_bytes);
  return policy.left_bytes() >= (smallest == ~uint64_t{0} ? 1 : smallest);
}

std::optional<SampleStore::Claim> SampleStore::claim(uint64_t index, uint64_t bytes) {
  PENSTOCK_ASSERT(bytes > 0);
  Entry& wanted = entry(index);
  for (;;) {
    uint64_t state = wanted.state.load(std::memory_order_acquire);
    if (kind_of(state) == kClaimed) {
      // Locking the mutex of a writer that died empties its entry. A writer claims under its mutex, so a claim that is
      // left while this thread holds it is nobody's.
      const uint32_t other = writer_of(state);
      if (!try_lock(other)) return std::nullopt;
      wanted.state.compare_exchange_strong(state, changed(state, kEmpty));
      ::pthread_mutex_unlock(&writer(other).mutex);
      continue;
    }
    if (kind_of(state) != kEmpty || is_exhausted() || are_all_barred() || !keeps(index)) return std::nullopt;
    const auto number = lock_writer();
    if (!number) return std::nullopt;
    // Before the claim, so that the next one to lock the mutex of a dead writer finds its entry.
    writer(*number).claimed.store(index + 1);
    if (!wanted.state.compare_exchange_strong(state, changed(state, kClaimed, *number))) {
      writer(*number).claimed.store(0);
      ::pthread_mutex_unlock(&writer(*number).mutex);
      continue;
    }
    Claim claim(*this, index, *number);
    claim.memory_ = memory_for(wanted, bytes);
    if (claim.memory_.empty()) return std::nullopt;
    return claim;
  }
}

// The memory of a claimed entry; empty if there is none left.
std::span<std::byte> SampleStore::memory_for(Entry& entry, uint64_t bytes) {
  uint64_t smallest = control().smallest_bytes.value.load(std::memory_order_relaxed);
  const uint64_t capacity = align_up(bytes, kSampleAlignment);
  while (smallest < ~capacity && !control().smallest_bytes.value.compare_exchange_weak(smallest, ~capacity)) {
  }
  const uint64_t budget = control().budget_bytes;
  const bool is_placed = capacity <= budget && entry.place.load(std::memory_order_relaxed) <= budget - capacity;
  if (!is_placed || entry.capacity.load(std::memory_order_relaxed) < capacity) {
    const auto place = cache::FillOnce(control().admitted_bytes.value, control().budget_bytes).admit(capacity);
    if (!place) return {};
    entry.place.store(*place, std::memory_order_relaxed);
    entry.capacity.store(capacity, std::memory_order_relaxed);
  }
  const uint64_t place = entry.place.load(std::memory_order_relaxed);
  entry.bytes.store(bytes, std::memory_order_relaxed);
  // Memory is allocated before it is touched: a full system is an error here, and no SIGBUS later.
  const auto start = static_cast<off_t>(control().slab_place + place);
  if (::posix_fallocate(fd_.get(), start, static_cast<off_t>(capacity)) != 0) {
    control().is_exhausted.store(1, std::memory_order_relaxed);
    return {};
  }
  return {base_ + start, bytes};
}

void SampleStore::Claim::publish() { std::exchange(store_, nullptr)->release(index_, writer_, kReady); }

SampleStore::Claim::~Claim() {
  if (store_ != nullptr) store_->release(index_, writer_, kEmpty);
}

void SampleStore::release(uint64_t index, uint32_t number, uint64_t kind) {
  Entry& own = entry(index);
  uint64_t state = own.state.load(std::memory_order_relaxed);
  // release: pairs with the acquire in find(), so a thread that finds the entry ready finds the bytes. A claim that is
  // gone was damaged, and so the entry is left as it is.
  if (kind_of(state) == kClaimed && writer_of(state) == number)
    own.state.compare_exchange_strong(state, changed(state, kind), std::memory_order_release);
  writer(number).claimed.store(0);
  ::pthread_mutex_unlock(&writer(number).mutex);
}

// Empties the entry that a dead writer has claimed.
bool SampleStore::try_lock(uint32_t number) {
  Writer& locked = writer(number);
  const int outcome = ::pthread_mutex_trylock(&locked.mutex);
  if (outcome != 0 && outcome != EOWNERDEAD) return false;
  if (const uint64_t claimed = locked.claimed.load(); claimed > 0 && claimed <= control().sample_count) {
    Entry& left = entry(claimed - 1);
    uint64_t state = left.state.load();
    if (kind_of(state) == kClaimed && writer_of(state) == number)
      left.state.compare_exchange_strong(state, changed(state, kEmpty));
    locked.claimed.store(0);
  }
  if (outcome == EOWNERDEAD) ::pthread_mutex_consistent(&locked.mutex);
  return true;
}

std::optional<uint32_t> SampleStore::lock_writer() {
  // Threads start at different writers, so that they seldom meet.
  const auto first = static_cast<uint32_t>(::gettid()) * 7;
  for (uint32_t step = 0; step < kWriterCount; ++step)
    if (const uint32_t number = (first + step) % kWriterCount; try_lock(number)) return number;
  return std::nullopt;
}

void SampleStore::keep_only(uint64_t first, uint64_t end) {
  PENSTOCK_ASSERT(first < end && end <= sample_count());
  control().kept_end.store(end);
  control().kept_first.store(first);
  control().missed_kept.store(0);
  control().missed.store(0);
}

bool SampleStore::keeps(uint64_t index) const {
  const uint64_t end = control().kept_end.load(std::memory_order_relaxed);
  return end == 0 || (index < end && index >= control().kept_first.load(std::memory_order_relaxed));
}

void SampleStore::note_missed(uint64_t index) {
  if (control().kept_end.load(std::memory_order_relaxed) == 0) return;
  const bool is_kept = keeps(index);
  const uint64_t kept = control().missed_kept.fetch_add(is_kept, std::memory_order_relaxed) + is_kept;
  const uint64_t missed = control().missed.fetch_add(1, std::memory_order_relaxed) + 1;
  if (missed == kMissedMin && kept < missed * kKeptShareMin) control().kept_end.store(0);
}

void SampleStore::bar(uint64_t index) {
  uint64_t state = entry(index).state.load();
  while (kind_of(state) == kEmpty)
    if (entry(index).state.compare_exchange_weak(state, changed(state, kBarred))) return;
}

bool SampleStore::is_barred(uint64_t index) const {
  return kind_of(entry(index).state.load(std::memory_order_relaxed)) == kBarred || are_all_barred();
}

void SampleStore::bar_all() { control().are_all_barred.store(1); }
bool SampleStore::are_all_barred() const { return control().are_all_barred.load(std::memory_order_relaxed) != 0; }

uint64_t SampleStore::count(StoreCount kind, uint64_t number) {
  return control().counts[static_cast<size_t>(kind)].value.fetch_add(number, std::memory_order_relaxed);
}

uint64_t SampleStore::counted(StoreCount kind) const {
  return control().counts[static_cast<size_t>(kind)].value.load(std::memory_order_relaxed);
}

}  // namespace penstock::shm
