// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bytes of a record of visits: the samples of a rank, one record per batch.
//
// A file is a header and records, each a frame and a body, aligned to 8 bytes. All numbers are little-endian.
//
//     header  "PNSTKVIS"  u32 version  u32 rank  u32 world_size  u32 0  u64 0  u64 digest
//     frame   u64 chain  u32 body_bytes  u8 kind  u8 width  u16 flags
//     batch   u32 epoch  u32 count  i64 step  i64 base  count * width bytes of indices
//     end     u32 epoch  u32 0  i64 steps
//     session i64 time_ns  i64 dataset_size  i64 samples_per_epoch  u32 length and text of: loader, dataset, sampler,
//             job
//
// `chain` is a digest of the frame's other fields, the body and the chain before, and is stored last: a record without
// it was not finished. It detects torn and damaged records, not forged ones, which the Merkle tree's root detects. The
// chain of an empty rest is 0, which no record has.
//
// An index is `base` plus an unsigned number of `width` bytes. Width 0 is a run: base, base + 1 and so on. A batch of
// 64 of a million samples takes 40 + 3 * 64 bytes.
//
// The leaf of a batch in the Merkle tree is its record from `kind` on, without the padding. So runs that were given the
// same samples in the same steps have the same tree, regardless of when and in how many sessions.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::visits {

constexpr uint32_t kFormatVersion = 1;
constexpr size_t kHeaderBytes = 40;
constexpr size_t kFrameBytes = 16;
constexpr size_t kBatchBytes = 24;
constexpr size_t kLeafOffset = 12;  // in a record: from `kind` on
// A batch of more indices than this is refused: its record would not fit the length field.
constexpr uint32_t kIndicesMax = 1 << 28;

enum class RecordKind : uint8_t { kSession = 1, kBatch = 2, kEpochEnd = 3 };

// The flags of a batch and of a session.
constexpr uint16_t kHashedKeys = 1;      // the indices are digests of keys that are not integers
constexpr uint16_t kUnknownIndices = 2;  // only the place and the number of samples are known; 0 if not even that
constexpr uint16_t kMayRepeat = 4;       // of a session: the sampler draws samples repeatedly on purpose
constexpr uint16_t kHasNoPlace = 8;      // of a session: the loader numbers its epochs and steps from 0
constexpr uint16_t kSameProcess = 16;    // of a session: its facts have changed, in the process of the session before
constexpr uint16_t kInOrder = 32;        // of a session: batches are given in the order of their places

struct RankOfJob {
  uint32_t rank = 0;
  uint32_t world_size = 1;

  friend auto operator<=>(const RankOfJob&, const RankOfJob&) = default;
};

// Facts that are known when a program starts to record.
struct Session {
  int64_t time_ns = 0;             // since 1970
  int64_t dataset_size = -1;       // -1: unknown
  int64_t samples_per_epoch = -1;  // different samples that all ranks together are given in an epoch; -1: unknown
  uint16_t flags = 0;
  std::string loader;   // such as "penstock" or "torch"
  std::string dataset;  // its type and version
  std::string sampler;
  std::string job;
};

// A batch in a file.
struct BatchView {
  uint32_t epoch = 0;
  uint32_t count = 0;
  int64_t step = 0;
  int64_t base = 0;
  uint16_t flags = 0;
  uint8_t width = 0;
  std::span<const std::byte> packed;

  bool knows_indices() const { return (flags & kUnknownIndices) == 0; }
  int64_t index(uint32_t place) const;
  void append_to(std::vector<int64_t>& indices) const;
};

// A record's fields, without its chain.
struct RecordView {
  RecordKind kind{};
  uint16_t flags = 0;
  std::span<const std::byte> body;
  std::span<const std::byte> leaf;
  uint8_t width = 0;
};

// The bytes of `indices` at a width.
struct Packing {
  int64_t base = 0;
  uint8_t width = 0;

  static Packing of(std::span<const int64_t> indices);
  // Writes them; up to 8 bytes after the last one are written, too.
  void write(std::span<const int64_t> indices, std::byte* place) const;
};

std::array<std::byte, kHeaderBytes> header_of(RankOfJob rank);
// Returns the rank of a file that starts with `bytes`. kMalformed if it is no record of visits, kMismatch if it has
// another version.
Result<RankOfJob> parse_header(std::span<const std::byte> bytes);

// The chain after a record: `bytes` are the record's from its length to the end of its body.
uint64_t chain_after(uint64_t before, std::span<const std::byte> bytes);

std::vector<std::byte> body_of(const Session& session);
Result<Session> parse_session(const RecordView& record);
Result<BatchView> parse_batch(const RecordView& record);

// The number of bytes of a record, with its padding.
constexpr uint64_t record_bytes(uint64_t body_bytes) { return (kFrameBytes + body_bytes + 7) & ~uint64_t{7}; }

}  // namespace penstock::visits
