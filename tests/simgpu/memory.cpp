// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "device.h"

namespace simgpu {
namespace {

constexpr size_t kSpaceBytes = size_t{16} << 30;  // of addresses, a device
constexpr size_t kDefaultLimit = size_t{1} << 30;
constexpr size_t kGranule = 512;
constexpr int kPoison = 0xA5;

using Marks = std::vector<Mark>;

bool are_over(const Marks& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return Streams::get().is_over(mark); });
}

std::byte* reserve(int protection) {
  void* const base = ::mmap(nullptr, kSpaceBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "simgpu: reserving address space failed");
  return static_cast<std::byte*>(base);
}

// Thread-safe.
class Space {
 public:
  explicit Space(c10::DeviceIndex device)
      : device_(device), base_(reserve(PROT_NONE)), bytes_(reserve(PROT_READ | PROT_WRITE)) {
    holes_[0] = kSpaceBytes;
  }

  bool contains(const void* pointer) const {
    const auto* const place = static_cast<const std::byte*>(pointer);
    return place >= base_ && place < base_ + kSpaceBytes;
  }
  std::byte* on_host(const void* pointer) const { return bytes_ + (static_cast<const std::byte*>(pointer) - base_); }

  void* allocate(size_t wanted, c10::Stream stream) {
    const size_t size = (wanted + kGranule - 1) / kGranule * kGranule;
    const std::lock_guard lock(mutex_);
    check_limit(wanted, size);
    size_t place = 0;
    if (const auto reused = find_freed(size, stream); reused != freed_.end()) {
      place = reused->place;
      freed_.erase(reused);
    } else {
      place = take_hole(size);
      std::memset(bytes_ + place, kPoison, size);
    }
    blocks_[place] = {.size = size, .stream = stream, .others = {}};
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    return base_ + place;
  }

  void free(const void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(place_of(pointer));
    if (block == blocks_.end()) return;
    Freed freed{.place = block->first, .size = block->second.size, .stream = block->second.stream, .marks = {}};
    freed.marks.push_back(Streams::get().end_of(freed.stream));
    for (const c10::Stream& other : block->second.others) freed.marks.push_back(Streams::get().end_of(other));
    allocated_ -= freed.size;
    blocks_.erase(block);
    freed_.push_back(std::move(freed));
  }

  void record_use(const void* pointer, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(place_of(pointer));
    if (block != blocks_.end() && block->second.stream != stream) block->second.others.push_back(stream);
  }

  void set_limit(size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes == 0 ? kDefaultLimit : bytes;
  }

  size_t allocated() const {
    const std::lock_guard lock(mutex_);
    return allocated_;
  }
  size_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  size_t limit() const {
    const std::lock_guard lock(mutex_);
    return limit_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = allocated_;
  }

 private:
  struct Block {
    size_t size = 0;
    c10::Stream stream = Streams::default_of(0);
    std::vector<c10::Stream> others;  // that were recorded
  };
  struct Freed {
    size_t place = 0;
    size_t size = 0;
    c10::Stream stream = Streams::default_of(0);
    Marks marks;  // the first is the stream's own
  };

  size_t place_of(const void* pointer) const {
    return static_cast<size_t>(static_cast<const std::byte*>(pointer) - base_);
  }

  void check_limit(size_t wanted, size_t size) const {
    TORCH_CHECK_WITH(OutOfMemoryError, allocated_ + size <= limit_, "simgpu out of memory. Tried to allocate ", wanted,
                     " bytes. Device ", static_cast<int>(device_), " has a total capacity of ", limit_,
                     " bytes of which ", limit_ - std::min(limit_, allocated_), " bytes are free.");
  }

  // What was freed last comes first, so that a use that nobody recorded is found.
  std::vector<Freed>::iterator find_freed(size_t size, c10::Stream stream) {
    const auto found = std::find_if(freed_.rbegin(), freed_.rend(), [&](const Freed& freed) {
      if (freed.size != size) return false;
      const auto first = freed.marks.begin() + (freed.stream == stream ? 1 : 0);
      return are_over({first, freed.marks.end()});
    });
    return found == freed_.rend() ? freed_.end() : std::prev(found.base());
  }

  size_t take_hole(size_t size) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < size) continue;
      const auto [place, room] = *hole;
      holes_.erase(hole);
      if (room > size) holes_[place + size] = room - size;
      return place;
    }
    give_back_freed();
    return take_hole(size);  // raises nothing: the limit is far below the address space
  }

  void give_back_freed() {
    for (const Freed& freed : freed_) {
      for (const Mark& mark : freed.marks) Streams::get().finish(mark);
      holes_[freed.place] = freed.size;
    }
    freed_.clear();
    for (auto hole = holes_.begin(); hole != holes_.end();) {
      const auto next = std::next(hole);
      if (next != holes_.end() && hole->first + hole->second == next->first) {
        hole->second += next->second;
        holes_.erase(next);
      } else {
        hole = next;
      }
    }
  }

  const c10::DeviceIndex device_;
  std::byte* const base_;
  std::byte* const bytes_;
  mutable std::mutex mutex_;
  std::map<size_t, Block> blocks_;
  std::map<size_t, size_t> holes_;  // their sizes, by place
  std::vector<Freed> freed_;
  size_t allocated_ = 0;
  size_t peak_ = 0;
  size_t limit_ = kDefaultLimit;
};

std::array<Space*, kDeviceCount>& spaces() {
  static auto* const all = [] {
    auto made = std::make_unique<std::array<Space*, kDeviceCount>>();
    for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index)
      (*made)[static_cast<size_t>(index)] = std::make_unique<Space>(index).release();
    return made.release();  // never destroyed, as tensors are freed while the process ends
  }();
  return *all;
}

Space& space_of(const void* pointer) {
  for (Space* const space : spaces()) {
    if (space->contains(pointer)) return *space;
  }
  TORCH_CHECK(false, "simgpu: this is no pointer of the device");
}

void free_device_memory(void* pointer) {
  if (pointer == nullptr || Streams::get().is_in_bad_fork()) return;
  space_of(pointer).free(pointer);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return simgpu::allocate(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(on_host(target), on_host(source), bytes);
  }
  bool initialized() override { return Streams::get().is_used(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Space& space = *spaces().at(static_cast<size_t>(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = static_cast<int64_t>(space.allocated());
    bytes.peak = static_cast<int64_t>(space.peak());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { spaces().at(static_cast<size_t>(device))->reset_peak(); }
};

// ---- Pinned memory

struct PinnedBlock {
  size_t size = 0;
  bool is_in_use = false;
  Marks marks;  // the ends of the copies that use it
};

// Blocks are kept, and used again once the copies that were reported are over. Thread-safe.
class Pinned {
 public:
  void* allocate(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t size = std::max<size_t>(4096, (bytes + 4095) / 4096 * 4096);
    for (auto& [base, block] : blocks_) {
      if (block.is_in_use || block.size != size || !are_over(block.marks)) continue;
      block.is_in_use = true;
      block.marks.clear();
      return base;
    }
    auto* const base = static_cast<std::byte*>(std::aligned_alloc(4096, size));
    if (base == nullptr) throw std::bad_alloc();
    blocks_[base] = {.size = size, .is_in_use = true, .marks = {}};
    return base;
  }

  void free(void* base) {
    const std::lock_guard lock(mutex_);
    blocks_.at(static_cast<std::byte*>(base)).is_in_use = false;
  }

  bool note(const void* pointer, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    const auto block = find(pointer);
    if (block == blocks_.end()) return false;
    block->second.marks.push_back(Streams::get().end_of(stream));
    return true;
  }

  bool contains(const void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto registered = registered_.upper_bound(static_cast<const std::byte*>(pointer));
    if (registered != registered_.begin()) {
      const auto& [base, bytes] = *std::prev(registered);
      if (pointer < base + bytes) return true;
    }
    return find(pointer) != blocks_.end();
  }

  void add(const void* base, size_t bytes) {
    const std::lock_guard lock(mutex_);
    registered_[static_cast<const std::byte*>(base)] = bytes;
  }
  void remove(const void* base) {
    const std::lock_guard lock(mutex_);
    registered_.erase(static_cast<const std::byte*>(base));
  }

 private:
  std::map<std::byte*, PinnedBlock>::iterator find(const void* pointer) {
    const auto* const place = static_cast<const std::byte*>(pointer);
    const auto after = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& block) {
      return place >= block.first && place < block.first + block.second.size;
    });
    return after;
  }

  std::mutex mutex_;
  std::map<std::byte*, PinnedBlock> blocks_;
  std::map<const std::byte*, size_t> registered_;
};

Pinned& pinned() {
  static auto* const all = std::make_unique<Pinned>().release();
  return *all;
}

void free_pinned(void* base) {
  if (base != nullptr) pinned().free(base);
}

class PinnedMemory : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    Streams::get().check();
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    void* const base = pinned().allocate(bytes);
    return {base, base, &free_pinned, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override { return pinned().note(pointer, stream); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// Torch's allocators are told of memory that was registered elsewhere; in the older torches there is nothing to
// override.
class TellablePinnedMemory final : public PinnedMemory {
 public:
  void record_external_register(void* base, size_t bytes) { register_host(base, bytes); }
  void record_external_unregister(void* base) { unregister_host(base); }
};

}  // namespace

std::byte* on_host(const void* pointer) { return pointer == nullptr ? nullptr : space_of(pointer).on_host(pointer); }

c10::DeviceIndex device_of(const void* pointer) {
  for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index) {
    if (spaces()[static_cast<size_t>(index)]->contains(pointer)) return index;
  }
  TORCH_CHECK(false, "simgpu: this is no pointer of the device");
}

c10::DeviceAllocator& device_allocator() {
  static auto* const allocator = std::make_unique<DeviceMemory>().release();
  return *allocator;
}

c10::DataPtr allocate(c10::DeviceIndex device, size_t bytes) {
  Streams::get().check();
  if (bytes == 0) return {nullptr, nullptr, &free_device_memory, device_at(device)};
  void* const base = spaces().at(static_cast<size_t>(device))->allocate(bytes, Streams::get().current(device));
  return {base, base, &free_device_memory, device_at(device)};
}

void record_use(const void* base, c10::Stream stream) {
  if (base != nullptr) space_of(base).record_use(base, stream);
}

void set_memory_limit(c10::DeviceIndex device, size_t bytes) {
  spaces().at(static_cast<size_t>(device))->set_limit(bytes);
}

size_t allocated_bytes(c10::DeviceIndex device) { return spaces().at(static_cast<size_t>(device))->allocated(); }

at::HostAllocator& pinned_allocator() {
  static auto* const allocator = std::make_unique<TellablePinnedMemory>().release();
  return *allocator;
}

bool is_pinned(const void* pointer) { return pinned().contains(pointer); }
void register_host(const void* base, size_t bytes) { pinned().add(base, bytes); }
void unregister_host(const void* base) { pinned().remove(base); }

}  // namespace simgpu
