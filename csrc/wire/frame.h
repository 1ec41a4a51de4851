// SPDX-License-Identifier: Apache-2.0
#pragma once
// Frame, the record that describes one batch: a header, a table of its tensors, the nest that contains them, and the
// keys of the boundary tensors. The bytes of the tensors are stored elsewhere (in the slab, or in payload frames);
// PROTOCOL.md has the grammar. All values are checked against the caps below before any memory is allocated for them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace penstock::wire {

// The element types that cross a process boundary. The codes are identical to c10::ScalarType's, so the rooms with
// torch cast without a table; this room has no torch, so the sizes are listed here. Loader and worker assert that both
// agree.
using DTypeCode = uint8_t;

constexpr DTypeCode kDTypeUInt8 = 0;
constexpr DTypeCode kDTypeFloat32 = 6;
constexpr DTypeCode kDTypeBool = 11;

// Bytes of one element, or 0 for a code that cannot be in the tensor table (Python pickles quantised and packed types
// instead).
constexpr uint32_t dtype_bytes(DTypeCode code) {
  switch (code) {
    case 0:   // uint8
    case 1:   // int8
    case 11:  // bool
    case 23:  // float8_e5m2
    case 24:  // float8_e4m3fn
    case 25:  // float8_e5m2fnuz
    case 26:  // float8_e4m3fnuz
      return 1;
    case 2:   // int16
    case 5:   // float16
    case 15:  // bfloat16
    case 27:  // uint16
      return 2;
    case 3:   // int32
    case 6:   // float32
    case 8:   // complex32
    case 28:  // uint32
      return 4;
    case 4:   // int64
    case 7:   // float64
    case 9:   // complex64
    case 29:  // uint64
      return 8;
    case 10:  // complex128
      return 16;
    default: return 0;
  }
}

constexpr uint32_t kFrameMagic = 0x31464e50;  // "PNF1"
constexpr uint16_t kFrameVersion = 2;
constexpr uint64_t kPayloadAlignment = 64;

constexpr uint32_t kTensorCountMax = 65'536;
constexpr uint32_t kDimCountMax = 64;
constexpr uint64_t kPayloadBytesMax = uint64_t{1} << 40;
constexpr uint32_t kNestBytesMax = 1u << 30;
// The limit of shared-memory files that one record refers to. They stay open as descriptors until the batch is
// delivered.
constexpr uint32_t kSharedFileCountMax = 32;
constexpr uint32_t kBoundaryKeyBytes = 32;  // a boundary key is 128 bits in hexadecimal

enum class Encoding : uint8_t {
  kPlain = 0,     // the tensor's bytes, unchanged
  kWithheld = 1,  // a leaf that the trainer does not need: it stays with the worker, and the payload has no bytes of it
  kOffset8 = 2,   // from here to kPadded: see narrow.h
  kOffset16 = 3,
  kOffset32 = 4,
  kBits = 5,
  kRows = 6,
  kPadded = 7,
  kShared =
      8,  // the tensor is in a shared-memory file whose descriptor its worker passed; the payload has no bytes of it
};
constexpr bool is_narrow(Encoding encoding) { return encoding >= Encoding::kOffset8 && encoding <= Encoding::kPadded; }
// A tensor has at most this many times its encoded bytes, so that a short message cannot fill a trainer's memory.
constexpr uint64_t kWidenFactorMax = 64;
// The same limit for a pool batch as a whole: all its tensors, each counted separately even if they share bytes, plus
// the objects that represent them and the values of its nest.
constexpr uint64_t kWholeFactorMax = 64;
static_assert(kWholeFactorMax >= kWidenFactorMax, "a batch of one tensor may be compressed as much as the tensor");
// The limit of all elements' bytes in a pool batch, counting elements repeated by strides of 0. They take no memory
// until a program requests it, so they may be many times the received bytes, up to the limit of a batch without
// repetition.
constexpr uint64_t kElementBytesMax = uint64_t{1} << 34;
// The assumed size of the object that represents a tensor, more than torch and Python use for one.
constexpr uint64_t kTensorObjectBytes = 1024;

// One tensor: its shape and strides in elements, and the location of its bytes in the payload. `bytes` spans from the
// first to the last element, including holes of the strides; for a withheld or narrow tensor, it is the size of its
// bytes in the payload. For a shared tensor, `offset` is the offset in its file.
struct TensorEntry {
  DTypeCode dtype = 0;
  Encoding encoding = Encoding::kPlain;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  uint32_t file_index = 0;  // of a shared tensor: index of its file in the record

  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

// Boundary tensors are the last `boundary_keys.size()` entries of `tensors`; the nest refers only to the others.
struct Frame {
  std::vector<TensorEntry> tensors;
  std::vector<std::string_view> boundary_keys;
  std::span<const std::byte> nest;
  uint64_t payload_bytes = 0;

  size_t leaf_count() const { return tensors.size() - boundary_keys.size(); }
  // The number of shared-memory files that contain the tensors.
  uint32_t shared_file_count() const;
};

// Bytes from the first to the last element of a strided tensor; an error if a stride or a size is negative, or if the
// extent or the number of elements overflows.
Result<uint64_t> span_bytes(DTypeCode dtype, std::span<const int64_t> shape, std::span<const int64_t> strides);

// The bytes of the decoded tensor. The entry must have been checked.
uint64_t plain_bytes(const TensorEntry& entry);

// The bytes of all its elements, counting elements repeated by strides of 0; 2^64 - 1 if the number overflows. The
// entry must have been checked.
uint64_t element_bytes(const TensorEntry& entry);

// The bytes of all received tensors, counted without sharing, and of the objects that represent the tensors. The
// entries must have been checked.
uint64_t whole_bytes(const Frame& frame);

// The record of `frame`. Its entries must already carry their offsets.
std::vector<std::byte> write_frame(const Frame& frame);

// Reads a record. The views in the result (nest, keys) point into `bytes`.
Result<Frame> parse_frame(std::span<const std::byte> bytes);

// The fault of bytes that violate their grammar, in any record of this room. `subject` names the bytes, such as "a
// request"; `reason` describes the violation.
inline Fault malformed(std::string_view subject, std::string_view reason) {
  std::string message(subject);
  message += " is malformed: ";
  message += reason;
  message += "; the processes of a job must run the same version of penstock";
  return {Errc::kMalformed, std::move(message)};
}

}  // namespace penstock::wire
