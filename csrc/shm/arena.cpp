// SPDX-License-Identifier: Apache-2.0
#include "shm/arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "base/bytes.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace penstock::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

Fault no_memory(const std::string& what, int error_number) {
  return {Errc::kNoMemory, "shared memory for batches could not be allocated: " + what + ": " +
                               std::strerror(error_number) +
                               "; free memory, raise the memory limit, or lower batch_size, prefetch_factor or "
                               "PENSTOCK_ARENA_BYTES"};
}

Fault bad_arena(const std::string& what) {
  return {Errc::kMalformed, "the arena passed by a worker cannot be used: " + what +
                                "; trainer and workers must run the same version of penstock"};
}

Result<std::unique_ptr<ArenaMapping>> map_whole(int fd, uint64_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return no_memory("mapping " + std::to_string(bytes) + " bytes", errno);
  return std::make_unique<ArenaMapping>(static_cast<std::byte*>(base), bytes);
}

void give_back(const ArenaMapping& mapping, uint32_t slab_index, uint32_t generation) {
  // release: pairs with the acquire in Arena::try_acquire().
  mapping.slab_control(slab_index).released_generation.store(generation, std::memory_order_release);
  ArenaControl& control = mapping.control();
  control.release_count.fetch_add(1);
  if (control.is_worker_waiting.load() != 0) {
    ::syscall(SYS_futex, &control.release_count, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

}  // namespace

ArenaMapping::~ArenaMapping() { ::munmap(base_, bytes_); }

Result<std::shared_ptr<Arena>> Arena::create(const ArenaSpec& wanted, uint32_t arena_id) {
  PENSTOCK_ASSERT(wanted.slab_count > 0 && wanted.slab_count <= kSlabCountMax, "slabs: ", wanted.slab_count);
  const ArenaSpec spec{.slab_bytes = align_up(std::max<uint64_t>(wanted.slab_bytes, 1), page_bytes()),
                       .slab_count = wanted.slab_count};
  const uint64_t control_bytes = align_up(sizeof(ArenaControl) + spec.slab_count * sizeof(SlabControl), page_bytes());
  if (spec.slab_bytes > (kArenaBytesMax - control_bytes) / spec.slab_count) {
    return Fault{Errc::kTooLarge, "an arena of " + std::to_string(spec.slab_count) + " slabs of " +
                                      std::to_string(spec.slab_bytes) + " bytes is above the cap of " +
                                      std::to_string(kArenaBytesMax) + " bytes; lower batch_size or prefetch_factor"};
  }
  const uint64_t bytes = control_bytes + spec.slab_bytes * spec.slab_count;
  FileDescriptor fd(::memfd_create("penstock-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return no_memory("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return no_memory("a file of " + std::to_string(bytes) + " bytes", errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return no_memory("sealing the arena", errno);
  if (const int error_number = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(control_bytes)); error_number != 0) {
    return no_memory("the control page", error_number);
  }
  auto mapping = map_whole(fd.get(), bytes);
  if (!mapping) return mapping.error();
  // The memory is zero, which is the correct initial value of every atomic in it.
  auto* control = std::construct_at(reinterpret_cast<ArenaControl*>(mapping.value()->base()));
  control->magic = kArenaMagic;
  control->slab_count = spec.slab_count;
  control->slab_bytes = spec.slab_bytes;
  control->control_bytes = control_bytes;
  return std::make_shared<Arena>(std::move(fd), std::move(mapping).value(), spec, arena_id);
}

Arena::Arena(FileDescriptor fd, std::unique_ptr<ArenaMapping> mapping, const ArenaSpec& spec, uint32_t arena_id)
    : fd_(std::move(fd)),
      mapping_(std::move(mapping)),
      spec_(spec),
      arena_id_(arena_id),
      slabs_(spec.slab_count),
      pins_(std::make_unique<std::atomic<uint32_t>[]>(spec.slab_count)) {}

std::optional<uint32_t> Arena::try_acquire(uint32_t end) {
  for (uint32_t index = 0; index < std::min(end, spec_.slab_count); ++index) {
    const SlabControl& control = mapping_->slab_control(index);
    // acquire: pairs with the release in give_back(), so the trainer's last reads have completed.
    if (control.released_generation.load(std::memory_order_acquire) != slabs_[index].generation) continue;
    if (control.retired.load(std::memory_order_acquire) != 0) continue;
    // acquire: pairs with the release in unpin().
    if (pins_[index].load(std::memory_order_acquire) != 0) continue;
    ++slabs_[index].generation;
    return index;
  }
  return std::nullopt;
}

void Arena::wait_for_release(std::chrono::milliseconds timeout, uint32_t end) {
  ArenaControl& control = mapping_->control();
  const uint32_t seen = control.release_count.load();
  control.is_worker_waiting.store(1);
  // A release between the caller's try_acquire() and the load above would be missed, so check again before sleeping.
  for (uint32_t index = 0; index < std::min(end, spec_.slab_count); ++index) {
    const SlabControl& slab = mapping_->slab_control(index);
    if (slab.retired.load() == 0 && pins_[index].load() == 0 &&
        slab.released_generation.load() == slabs_[index].generation) {
      control.is_worker_waiting.store(0);
      return;
    }
  }
  const timespec duration{.tv_sec = timeout.count() / 1000, .tv_nsec = (timeout.count() % 1000) * 1'000'000};
  ::syscall(SYS_futex, &control.release_count, FUTEX_WAIT, seen, &duration, nullptr, 0);
  control.is_worker_waiting.store(0);
}

Result<void> Arena::reserve(uint32_t slab_index, uint64_t bytes) {
  PENSTOCK_ASSERT(bytes <= spec_.slab_bytes, bytes, " bytes in a slab of ", spec_.slab_bytes);
  Slab& slab = slabs_[slab_index];
  if (bytes <= slab.backed_bytes) return {};
  const uint64_t wanted = align_up(bytes, page_bytes());
  std::byte* start = this->slab(slab_index) + slab.backed_bytes;
  const auto offset = static_cast<off_t>(start - mapping_->base());
  const auto length = static_cast<off_t>(wanted - slab.backed_bytes);
  if (const int error_number = ::posix_fallocate(fd_.get(), offset, length); error_number != 0) {
    return no_memory(std::to_string(wanted) + " bytes of a slab", error_number);
  }
  // Populates all pages in one call; kernels older than 5.14 fault them in one by one on first use.
  ::madvise(start, static_cast<size_t>(length), MADV_POPULATE_WRITE);
  slab.backed_bytes = wanted;
  return {};
}

void Arena::cancel(uint32_t slab_index) { give_back(*mapping_, slab_index, slabs_[slab_index].generation); }

uint32_t Arena::alive_count() const {
  uint32_t count = 0;
  for (uint32_t index = 0; index < spec_.slab_count; ++index) {
    if (mapping_->slab_control(index).retired.load(std::memory_order_acquire) == 0) ++count;
  }
  return count;
}

uint32_t Arena::pinned_count() const {
  uint32_t count = 0;
  for (uint32_t index = 0; index < spec_.slab_count; ++index) {
    if (mapping_->slab_control(index).retired.load(std::memory_order_acquire) != 0) continue;
    if (pins_[index].load(std::memory_order_acquire) != 0) ++count;
  }
  return count;
}

std::byte* Arena::slab(uint32_t slab_index) const {
  return mapping_->base() + mapping_->control().control_bytes + slab_index * spec_.slab_bytes;
}

void Arena::unpin(uint32_t slab_index) {
  // release: pairs with the acquire in try_acquire(), so the holder's last accesses have completed.
  const uint32_t before = pins_[slab_index].fetch_sub(1, std::memory_order_release);
  PENSTOCK_ASSERT(before > 0, "slab ", slab_index, " was not pinned");
}

uint64_t Arena::total_backed_bytes() const {
  uint64_t total = 0;
  for (const Slab& slab : slabs_) total += slab.backed_bytes;
  return total;
}

Result<std::shared_ptr<ArenaView>> ArenaView::map(const FileDescriptor& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return bad_arena("fstat: " + std::string(std::strerror(errno)));
  // Huge pages are not guaranteed to exist, and reading a missing one kills the process.
  struct statfs system {};
  if (::fstatfs(fd.get(), &system) != 0 || system.f_type == HUGETLBFS_MAGIC)
    return bad_arena("it consists of huge pages");
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return bad_arena("it is not sealed against resizing");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < sizeof(ArenaControl) || bytes > kArenaBytesMax) {
    return bad_arena("it is " + std::to_string(bytes) + " bytes long");
  }
  auto mapping = map_whole(fd.get(), bytes);
  if (!mapping) return mapping.error();
  // The worker can still write here, so the fields are copied first; only the copies are checked and used.
  const ArenaControl& shared = mapping.value()->control();
  ArenaControl checked{};
  checked.magic = shared.magic;
  checked.slab_count = shared.slab_count;
  checked.slab_bytes = shared.slab_bytes;
  checked.control_bytes = shared.control_bytes;
  if (checked.magic != kArenaMagic) return bad_arena("its control page does not start with PNA1");
  if (checked.slab_count == 0 || checked.slab_count > kSlabCountMax) {
    return bad_arena("it has " + std::to_string(checked.slab_count) + " slabs");
  }
  if (checked.control_bytes < sizeof(ArenaControl) + checked.slab_count * sizeof(SlabControl) ||
      checked.control_bytes > bytes || checked.slab_bytes != (bytes - checked.control_bytes) / checked.slab_count ||
      checked.slab_bytes * checked.slab_count != bytes - checked.control_bytes) {
    return bad_arena("its slabs do not fill it");
  }
  if (checked.slab_bytes == 0 || checked.slab_bytes % page_bytes() != 0 || checked.control_bytes % page_bytes() != 0) {
    return bad_arena("its slabs are not whole pages");
  }
  return std::make_shared<ArenaView>(std::move(mapping).value(), std::move(checked));
}

ArenaView::ArenaView(std::unique_ptr<ArenaMapping> mapping, ArenaControl&& checked)
    : mapping_(std::move(mapping)),
      slab_count_(checked.slab_count),
      slab_bytes_(checked.slab_bytes),
      control_bytes_(checked.control_bytes),
      held_(std::make_unique<std::atomic<uint8_t>[]>(slab_count_)),
      populated_bytes_(std::make_unique<std::atomic<uint64_t>[]>(slab_count_)) {}

std::byte* ArenaView::slab(uint32_t slab_index) const {
  return mapping_->base() + control_bytes_ + slab_index * slab_bytes_;
}

void ArenaView::populate(uint32_t slab_index, uint64_t bytes) {
  const uint64_t done = populated_bytes_[slab_index].load(std::memory_order_relaxed);
  if (bytes <= done || bytes > slab_bytes_) return;
  // The worker has filled these pages, so one read fault maps 16 of them, and makes them writable as well: in shared
  // memory the kernel does not wait for a first write. Write faults map one page each and take twice the time (9.0
  // instead of 4.4 ms for 38 MB). A page that the worker has only allocated would take a separate fault in either case.
  ::madvise(slab(slab_index) + done, bytes - done, MADV_POPULATE_READ);
  populated_bytes_[slab_index].store(bytes, std::memory_order_relaxed);
}

void ArenaView::release(uint32_t slab_index, uint32_t generation) {
  set_held(slab_index, false);
  give_back(*mapping_, slab_index, generation);
}

void ArenaView::set_held(uint32_t slab_index, bool is_held) {
  const uint8_t before = held_[slab_index].exchange(is_held ? 1 : 0);
  if (is_held && before == 0) held_count_.fetch_add(1, std::memory_order_relaxed);
  if (!is_held && before == 1) held_count_.fetch_sub(1, std::memory_order_relaxed);
}

void ArenaView::retire(uint32_t slab_index) {
  if (mapping_->slab_control(slab_index).retired.exchange(1) == 0) retired_count_.fetch_add(1);
}

void ArenaView::retire_held() {
  for (uint32_t index = 0; index < slab_count_; ++index) {
    if (held_[index].load() != 0) retire(index);
  }
}

}  // namespace penstock::shm
