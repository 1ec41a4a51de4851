// SPDX-License-Identifier: Apache-2.0
#pragma once
// The record that describes one batch: a header, a table of its tensors, the nest they sit in, and the keys of the
// boundary tensors. The bytes of the tensors lie elsewhere (in the slab, or in payload frames); PROTOCOL.md has the
// grammar. Everything read is checked against the caps below before anything is allocated for it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/dtype.h"

namespace penstock::wire {

constexpr uint32_t kFrameMagic = 0x31464e50;  // "PNF1"
constexpr uint16_t kFrameVersion = 2;
constexpr uint64_t kPayloadAlignment = 64;

constexpr uint32_t kTensorCountMax = 65'536;
constexpr uint32_t kDimCountMax = 64;
constexpr uint64_t kPayloadBytesMax = uint64_t{1} << 40;
constexpr uint32_t kNestBytesMax = 1u << 30;
// Files in shared memory that one record refers to. They wait as open descriptors until the batch is delivered.
constexpr uint32_t kSharedFileCountMax = 32;
constexpr uint32_t kBoundaryKeyBytes = 32;  // a boundary key is 128 bits in hexadecimal

enum class Encoding : uint8_t {
  kPlain = 0,     // the bytes are those of the tensor
  kWithheld = 1,  // a leaf that the trainer does not need: it stays with the worker, and the payload has nothing of it
  kOffset8 = 2,   // from here on as narrow.h says
  kOffset16 = 3,
  kOffset32 = 4,
  kBits = 5,
  kRows = 6,
  kPadded = 7,
  kShared =
      8,  // the tensor lies in a file in shared memory that its worker has passed, and the payload has nothing of it
};
constexpr bool is_narrow(Encoding encoding) { return encoding >= Encoding::kOffset8 && encoding <= Encoding::kPadded; }
// A tensor has at most so many times the bytes that it is written in, so that few bytes cannot fill a trainer's memory.
constexpr uint64_t kWidenFactorMax = 64;
// So does a batch of a pool as a whole: all of its tensors, each with bytes of its own however they share them, and the
// objects that stand for them and for the values of its nest.
constexpr uint64_t kWholeFactorMax = 64;
static_assert(kWholeFactorMax >= kWidenFactorMax, "a batch of one tensor may be as narrow as the tensor");
// The elements of a batch of a pool, each counted where strides of 0 repeat some. They take no memory before a program
// asks for it, so they may be many times the bytes that came, and as many as a batch may have that repeats none.
constexpr uint64_t kElementBytesMax = uint64_t{1} << 34;
// The object that stands for a tensor is taken for so many bytes, more than torch and Python have for one.
constexpr uint64_t kTensorObjectBytes = 1024;

// One tensor: its shape and strides in elements, and where its bytes lie in the payload. `bytes` spans from the first
// to the last element, holes of the strides included; where it is withheld or written narrow, it is the bytes there. Of
// a shared tensor, `offset` is the place in its file.
struct TensorEntry {
  DTypeCode dtype = 0;
  Encoding encoding = Encoding::kPlain;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  uint32_t file_index = 0;  // of a shared tensor: which of the record's files

  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

// Boundary tensors are the last `boundary_keys.size()` entries of `tensors`; the nest refers only to the others.
struct Frame {
  std::vector<TensorEntry> tensors;
  std::vector<std::string_view> boundary_keys;
  std::span<const std::byte> nest;
  uint64_t payload_bytes = 0;

  size_t leaf_count() const { return tensors.size() - boundary_keys.size(); }
  // Files in shared memory that the tensors lie in.
  uint32_t shared_file_count() const;
};

// Bytes from the first to the last element of a strided tensor; nothing when a stride is negative, a size is negative,
// or the extent or the number of elements overflows.
Result<uint64_t> span_bytes(DTypeCode dtype, std::span<const int64_t> shape, std::span<const int64_t> strides);

// The bytes of the tensor itself, however it is written. The entry is one that was checked.
uint64_t plain_bytes(const TensorEntry& entry);

// The bytes of all its elements, each counted, as strides of 0 repeat some; 2^64 - 1 for more than that. The entry is
// one that was checked.
uint64_t element_bytes(const TensorEntry& entry);

// The bytes of all tensors that came, where each has its own, and of the objects that stand for the tensors. The
// entries are ones that were checked.
uint64_t whole_bytes(const Frame& frame);

// The record of `frame`. Its entries must already carry their offsets.
std::vector<std::byte> write_frame(const Frame& frame);

// Reads a record. The views in the result (nest, keys) point into `bytes`.
Result<Frame> parse_frame(std::span<const std::byte> bytes);

}  // namespace penstock::wire
