// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples in memory that the processes of one machine share: one memfd with an entry for each sample of a dataset, and
// the bytes of the stored samples. A sample is stored once and never evicted (cache/fill_once.h). Every process that
// has the memfd reads and writes, and any of them may be killed at any point.
//
// Invariants:
// - An entry is ready only after all bytes of its sample were written. A reader copies the bytes and then compares
//   their digest; bytes that do not match are not a sample, and the entry becomes empty again.
// - An entry is claimed only by a thread that holds the robust mutex of a writer. The kernel hands the mutex of a dead
//   thread to the next process that tries to lock it, which empties the entry. The bytes admitted for an entry stay
//   with it, so a sample that is stored again takes no more of the budget.

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/bytes.h"
#include "base/copy_digest.h"
#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::shm {

// Events that the processes count together.
enum class StoreCount : uint8_t {
  kHit,           // samples read from the store
  kHitBytes,      // their bytes
  kMiss,          // samples that had to be made
  kDiskHit,       // samples read from a store on disk
  kDiskHitBytes,  // their bytes
  kDiskEntry,     // samples that were written there
  kDiskEntryBytes,
  kDiskFull,    // samples that had no room there
  kMade,        // samples made in order to be stored
  kCompared,    // of these, samples made twice
  kDamaged,     // stored samples whose bytes did not match their digest
  kUncertain,   // samples that were not stored because another thread may have drawn random numbers
  kRandomWarn,  // requests to warn, of which only the first one is followed; the same for the next two
  kMemoryWarn,
  kDiskWarn,
};
constexpr size_t kStoreCountKinds = 15;

struct SampleStoreSpec {
  uint64_t sample_count;
  uint64_t budget_bytes;  // of samples, with their heads; not of the table of entries
};

// A stored sample starts with this head.
struct SampleHead {
  CopyDigest::Value digest;  // of the rest of the head, and of the sample
  uint64_t index;
  uint64_t bytes;  // of the sample, without this head
  uint64_t record_bytes;
  uint64_t tag;  // what else must agree for the sample to be current
};
static_assert(sizeof(SampleHead) == 64);

constexpr uint64_t kSampleAlignment = 64;
constexpr uint64_t kStoreBytesMax = uint64_t{1} << 46;
constexpr uint64_t kStoreSamplesMax = uint64_t{1} << 36;

// Thread-safe, except that a Claim is confined to the thread that made it.
class SampleStore {
 public:
  // The right to write one sample, and its memory. Without publish(), the entry becomes empty again.
  class Claim {
   public:
    Claim(SampleStore& store, uint64_t index, uint32_t writer) : store_(&store), index_(index), writer_(writer) {}
    Claim(Claim&& other) noexcept
        : store_(std::exchange(other.store_, nullptr)),
          index_(other.index_),
          writer_(other.writer_),
          memory_(other.memory_) {}
    Claim& operator=(Claim&&) = delete;
    ~Claim();

    std::span<std::byte> memory() const { return memory_; }
    // All bytes of memory() are written.
    void publish();

   private:
    friend class SampleStore;

    SampleStore* store_;  // null once it is published or moved
    uint64_t index_;
    uint32_t writer_;
    std::span<std::byte> memory_;
  };

  // The bytes of a stored sample, which another process may overwrite after they were found to be damaged: copy them
  // and then compare their digest.
  struct Found {
    std::span<const std::byte> bytes;
    uint64_t state;
  };

  // Fails with kNoMemory if the system has no room for the table or the address space.
  static Result<std::shared_ptr<SampleStore>> create(const SampleStoreSpec& spec);
  // Maps the store of another process, which passed its memfd.
  static Result<std::shared_ptr<SampleStore>> attach(FileDescriptor fd);

  SampleStore(FileDescriptor fd, std::byte* base, uint64_t mapped_bytes);
  SampleStore(const SampleStore&) = delete;
  SampleStore& operator=(const SampleStore&) = delete;
  ~SampleStore();

  // What the entries are now.
  struct Contents {
    uint64_t sample_count = 0;
    uint64_t bytes = 0;  // of the samples, their heads included
    uint64_t barred_count = 0;
  };
  Contents contents() const;

  int fd() const { return fd_.get(); }
  uint64_t sample_count() const;
  uint64_t budget_bytes() const;

  std::optional<Found> find(uint64_t index) const;
  // Empties the entry whose bytes were found to be damaged, unless it has changed since.
  void drop(uint64_t index, const Found& found);

  // Whether the sample has memory already, or one as small as the smallest one so far has room.
  bool has_room(uint64_t index) const;
  // Claims the entry of a sample for `bytes`, its head included. No value if the sample is stored already or another
  // live thread writes it, if it does not fit, or if the system has no memory left, which is_exhausted() then reports.
  std::optional<Claim> claim(uint64_t index, uint64_t bytes);
  bool is_exhausted() const;

  // Stores only samples from `first` to `end` - 1 from now on, in all processes, unless few of the next samples that
  // are missed are among them: then the caller was wrong about the samples that are read.
  void keep_only(uint64_t first, uint64_t end);
  bool keeps(uint64_t index) const;
  // Counts a sample that was not found.
  void note_missed(uint64_t index);

  // Marks a sample as one that is never stored.
  void bar(uint64_t index);
  bool is_barred(uint64_t index) const;
  // The same for all samples, including stored ones.
  void bar_all();
  bool are_all_barred() const;

  // Returns the count before.
  uint64_t count(StoreCount kind, uint64_t number = 1);
  uint64_t counted(StoreCount kind) const;

 private:
  struct Entry;
  struct Writer;
  struct Control;

  Control& control() const;
  Entry& entry(uint64_t index) const;
  Writer& writer(uint32_t number) const;
  bool try_lock(uint32_t number);
  std::optional<uint32_t> lock_writer();
  void release(uint64_t index, uint32_t number, uint64_t kind);
  std::span<std::byte> memory_for(Entry& entry, uint64_t bytes);

  FileDescriptor fd_;
  std::byte* base_;
  uint64_t mapped_bytes_;
};

}  // namespace penstock::shm
