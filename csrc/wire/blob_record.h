// SPDX-License-Identifier: Apache-2.0
#pragma once
// Blobs: the parts of requests that are sent to a worker only once, such as jobs, prefixes and folders of modules. Each
// is identified by the SHA-256 of its bytes, so it is transferred only once, even if links and trainers change. First
// come the messages by which a worker receives a blob, then the contents of two kinds of blobs: shipments and prefixes.
// PROTOCOL.md is the specification.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/numerics.h"
#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

constexpr uint32_t kBlobMagic = 0x31424e50;  // "PNB1"
constexpr uint16_t kBlobVersion = 1;
constexpr size_t kBlobRecordBytes = 64;
constexpr uint64_t kBlobBytesMax = uint64_t{1} << 38;
// Small enough that a slow link transfers two chunks in a fraction of a lease: pings queue behind them.
constexpr uint64_t kBlobPieceBytesMax = uint64_t{256} << 10;

using BlobId = std::array<std::byte, 32>;
static_assert(alignof(BlobId) == 1);

// The consecutive ids in `bytes`, whose size must be a multiple of an id's.
std::span<const BlobId> blob_ids(std::span<const std::byte> bytes);

// To a trainer: requests the chunk that starts at `offset`. The worker requests a blob chunk by chunk, at its own pace,
// and repeats the request for missing chunks; neither side keeps state about the other. Messages about blobs do not
// belong to a link.
struct BlobRequest {
  BlobId id{};
  uint64_t offset = 0;

  friend bool operator==(const BlobRequest&, const BlobRequest&) = default;
};

// To a worker, before a second part of at most kBlobPieceBytesMax: the chunk that starts at `offset`, of `total_bytes`.
struct BlobPiece {
  BlobId id{};
  uint64_t offset = 0;
  uint64_t total_bytes = 0;

  friend bool operator==(const BlobPiece&, const BlobPiece&) = default;
};

// To a worker: the trainer does not have the blob, or no longer has it.
struct BlobUnknown {
  BlobId id{};

  friend bool operator==(const BlobUnknown&, const BlobUnknown&) = default;
};

using BlobMessage = std::variant<BlobRequest, BlobPiece, BlobUnknown>;

// Whether a message's first part starts like these messages, and not like a message of pool_record.h.
bool is_blob_message(std::span<const std::byte> part);

std::vector<std::byte> write_blob_message(const BlobMessage& message);

// kMalformed, or kMismatch for another version. `piece_bytes` is the size of the message's second part, 0 if there is
// none. A blob has at least one byte.
Result<BlobMessage> parse_blob_message(std::span<const std::byte> part, uint64_t piece_bytes);

constexpr uint32_t kShipmentMagic = 0x31534e50;  // "PNS1"
constexpr size_t kShipmentListMax = 256;         // number of key lists
constexpr size_t kShipmentBytesMax = size_t{16} << 20;

// The leaves that pool workers leave out of a trainer's batches: leaves that the trainer does not read once it has the
// boundary tensors. A shipment is sent as a blob, like a prefix, and requests name it, so that a batch is sent in the
// same way by every worker.
struct Shipment {
  // Leaves are left out of a batch that has all boundary keys of one of these lists. There is one list for each plan in
  // use.
  std::vector<std::vector<std::string>> boundary_keys;
  std::vector<uint32_t> withheld;  // leaves, by their index in the batch's table
  // Batches whose number in their epoch is a multiple of this are sent whole: the trainer compares them. 0: none.
  uint64_t whole_every = 0;

  friend bool operator==(const Shipment&, const Shipment&) = default;
};

// Whether bytes are a shipment, not a prefix.
bool is_shipment(std::span<const std::byte> bytes);

std::vector<std::byte> write_shipment(const Shipment& shipment);

// kMalformed or kTooLarge.
Result<Shipment> parse_shipment(std::span<const std::byte> bytes);

// A tensor of the batch as expected by the compiled library.
struct PrefixLeaf {
  uint32_t leaf_index = 0;
  DTypeCode dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  friend bool operator==(const PrefixLeaf&, const PrefixLeaf&) = default;
};

// The trainer's settings that determine its results. Precisions are values of torch's enumeration.
struct PrefixSettings {
  bool flushes_denormals = false;
  bool is_deterministic = false;
  bool uses_mkldnn = true;
  uint8_t matmul_precision = 0;
  uint8_t convolution_precision = 0;
  DTypeCode default_dtype = kDTypeFloat32;

  friend bool operator==(const PrefixSettings&, const PrefixSettings&) = default;
};

struct PrefixConstant {
  TensorEntry entry;  // its offset counts from the first byte of the constants; the writer sets it
  std::span<const std::byte> bytes;
};

// The body of a prefix request: a batch record whose nest contains the IR text, a seed, the compiled library, and the
// numerics and settings of the trainer's kernels, and whose tensors are the constants, so that a prefix is sent in the
// same checked form as a batch. Text, library and the constants' bytes are views of the message that was read, or of
// the memory to be written.
struct PrefixBody {
  std::string_view text;
  uint64_t seed = 0;
  std::string_view library;
  std::vector<PrefixLeaf> library_leaves;
  std::vector<PrefixConstant> constants;
  Numerics numerics{};
  PrefixSettings settings{};
};

// The constants' entries must match their bytes, except for the offsets.
std::vector<std::byte> write_prefix_body(const PrefixBody& body);

Result<PrefixBody> parse_prefix_body(std::span<const std::byte> bytes);

}  // namespace penstock::wire
