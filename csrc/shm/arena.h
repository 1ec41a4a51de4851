// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared memory for batches between a worker and its trainer on one host. A worker creates an arena: one sealed memfd
// that holds a control page and slabs of equal size. It fills a slab, refers to it in the descriptor that it sends to
// the trainer, and may reuse the slab once the trainer has written the slab's generation back into the control page.
// Releasing a slab is one store and, if the worker sleeps on it, one futex call, so the last tensor on a slab may be
// destroyed on any thread.
//
// A slab initially is only address space: its memory is allocated (posix_fallocate) and pre-faulted up to the size of
// its largest batch so far. A full memory limit therefore is an error when a slab grows and never a SIGBUS, and small
// batches use little memory.
//
// Invariant: a slab is free when released_generation == generation, it has no local pins, and it is not retired.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::shm {

constexpr uint32_t kArenaMagic = 0x31414e50;  // "PNA1"
constexpr uint32_t kSlabCountMax = 1024;
constexpr uint64_t kArenaBytesMax = uint64_t{1} << 40;

// One per slab, each on a separate cache line, in memory shared by both processes.
struct alignas(64) SlabControl {
  std::atomic<uint32_t> released_generation;  // written by the trainer
  std::atomic<uint32_t> retired;              // set by the trainer: must not be reused
};
static_assert(sizeof(SlabControl) == 64);

struct alignas(64) ArenaControl {
  uint32_t magic;
  uint32_t slab_count;
  uint64_t slab_bytes;
  uint64_t control_bytes;               // the offset of slab 0
  std::atomic<uint32_t> release_count;  // the futex word: incremented by each release
  std::atomic<uint32_t> is_worker_waiting;
  uint32_t reserved[8];
};
static_assert(sizeof(ArenaControl) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

struct ArenaSpec {
  uint64_t slab_bytes;  // rounded up to whole pages
  uint32_t slab_count;
};

// A mapped memfd, unmapped by the destructor. Thread-safe.
class ArenaMapping {
 public:
  ArenaMapping(std::byte* base, uint64_t bytes) : base_(base), bytes_(bytes) {}
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;
  ~ArenaMapping();

  ArenaControl& control() const { return *reinterpret_cast<ArenaControl*>(base_); }
  SlabControl& slab_control(uint32_t slab_index) const {
    return reinterpret_cast<SlabControl*>(base_ + sizeof(ArenaControl))[slab_index];
  }
  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  uint64_t bytes_;
};

// The number of slabs per arena that user code in the trainer may hold: all but one for each batch that the worker
// still has to deliver. Beyond this number, the trainer copies batches out and releases their slabs immediately, so at
// least one slab always returns.
constexpr uint32_t spare_slab_count(uint32_t alive_count, uint32_t prefetch_factor) {
  if (alive_count > prefetch_factor) return alive_count - prefetch_factor;
  return alive_count > 1 ? 1 : 0;
}

// The worker's side. Confined to the thread that serves requests, except unpin() and cancel(), which any thread may
// call.
class Arena {
 public:
  static Result<std::shared_ptr<Arena>> create(const ArenaSpec& wanted, uint32_t arena_id);

  Arena(FileDescriptor fd, std::unique_ptr<ArenaMapping> mapping, const ArenaSpec& spec, uint32_t arena_id);

  uint32_t id() const { return arena_id_; }
  int fd() const { return fd_.get(); }
  uint64_t slab_bytes() const { return spec_.slab_bytes; }
  uint32_t slab_count() const { return spec_.slab_count; }

  // Returns the free slab with the lowest index (its memory was used last, so it is still in cache), now in use under a
  // new generation. Considers only slabs before `end`.
  std::optional<uint32_t> try_acquire(uint32_t end = kSlabCountMax);

  // Waits until a slab before `end` is free, the trainer releases any slab, or `timeout` passes. Blocks.
  void wait_for_release(std::chrono::milliseconds timeout, uint32_t end = kSlabCountMax);

  // Backs the first `bytes` of a slab with memory. Fails with kNoMemory if the system has none left.
  Result<void> reserve(uint32_t slab_index, uint64_t bytes);

  // Gives back a slab that was acquired but not sent to a trainer. Called once, by the holder of the slab.
  void cancel(uint32_t slab_index);

  // Slabs that the trainer has not retired.
  uint32_t alive_count() const;

  // Slabs on which the worker itself has tensors, among the slabs that the trainer has not retired.
  uint32_t pinned_count() const;

  std::byte* slab(uint32_t slab_index) const;
  uint32_t generation(uint32_t slab_index) const { return slabs_[slab_index].generation; }
  uint64_t backed_bytes(uint32_t slab_index) const { return slabs_[slab_index].backed_bytes; }

  // Keeps a slab from being reused while the worker itself still has tensors on it.
  void pin(uint32_t slab_index) { pins_[slab_index].fetch_add(1, std::memory_order_relaxed); }
  void unpin(uint32_t slab_index);

  // The shared memory that this arena currently uses; grows with its slabs.
  uint64_t total_backed_bytes() const;

 private:
  struct Slab {
    uint32_t generation = 0;
    uint64_t backed_bytes = 0;
  };

  FileDescriptor fd_;
  std::unique_ptr<ArenaMapping> mapping_;
  ArenaSpec spec_;
  uint32_t arena_id_;
  std::vector<Slab> slabs_;
  std::unique_ptr<std::atomic<uint32_t>[]> pins_;
};

// The trainer's side of one arena. Thread-safe.
class ArenaView {
 public:
  // Maps the memfd of a worker after checking its seals, its size and its control page.
  static Result<std::shared_ptr<ArenaView>> map(const FileDescriptor& fd);

  ArenaView(std::unique_ptr<ArenaMapping> mapping, ArenaControl&& checked);

  uint32_t slab_count() const { return slab_count_; }
  uint64_t slab_bytes() const { return slab_bytes_; }
  std::byte* slab(uint32_t slab_index) const;

  // Faults in the pages of a slab so that the first reader does not have to. A no-op if that much was populated before.
  void populate(uint32_t slab_index, uint64_t bytes);

  // Called once per generation, when this process has no more references to the slab.
  void release(uint32_t slab_index, uint32_t generation);

  // Slabs whose tensors the user holds.
  uint32_t held_count() const { return held_count_.load(std::memory_order_relaxed); }
  uint32_t alive_count() const { return slab_count_ - retired_count_.load(std::memory_order_relaxed); }
  void set_held(uint32_t slab_index, bool is_held);

  // Ensures that the slab is never written again.
  void retire(uint32_t slab_index);

  // A forked child still sees the slabs that its parent's user held, so they must never be written again.
  void retire_held();

 private:
  std::unique_ptr<ArenaMapping> mapping_;
  uint32_t slab_count_;
  uint64_t slab_bytes_;
  uint64_t control_bytes_;
  std::unique_ptr<std::atomic<uint8_t>[]> held_;
  std::unique_ptr<std::atomic<uint64_t>[]> populated_bytes_;
  std::atomic<uint32_t> held_count_{0};
  std::atomic<uint32_t> retired_count_{0};
};

}  // namespace penstock::shm
