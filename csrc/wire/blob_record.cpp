// SPDX-License-Identifier: Apache-2.0
#include "wire/blob_record.h"

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::wire {
namespace {

enum class Kind : uint8_t { kRequest = 1, kPiece = 2, kUnknown = 3 };

struct BlobHead {
  uint32_t magic = kBlobMagic;
  uint16_t version = kBlobVersion;
  Kind kind = Kind::kRequest;
  uint8_t reserved = 0;
  BlobId id{};
  uint64_t offset = 0;
  uint64_t total_bytes = 0;
  uint64_t reserved_end = 0;
};
static_assert(sizeof(BlobHead) == kBlobRecordBytes);

Fault malformed_blob(std::string_view reason) { return malformed("a message about a blob of a job", reason); }

std::vector<std::byte> bytes_of(const BlobHead& head) {
  const auto bytes = std::as_bytes(std::span(&head, 1));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

std::span<const BlobId> blob_ids(std::span<const std::byte> bytes) {
  PENSTOCK_ASSERT(bytes.size() % sizeof(BlobId) == 0);
  return {reinterpret_cast<const BlobId*>(bytes.data()), bytes.size() / sizeof(BlobId)};
}

bool is_blob_message(std::span<const std::byte> part) {
  uint32_t magic = 0;
  if (part.size() < sizeof magic) return false;
  std::memcpy(&magic, part.data(), sizeof magic);
  return magic == kBlobMagic;
}

std::vector<std::byte> write_blob_message(const BlobMessage& message) {
  if (const auto* request = std::get_if<BlobRequest>(&message))
    return bytes_of({.kind = Kind::kRequest, .id = request->id, .offset = request->offset});
  if (const auto* piece = std::get_if<BlobPiece>(&message))
    return bytes_of(
        {.kind = Kind::kPiece, .id = piece->id, .offset = piece->offset, .total_bytes = piece->total_bytes});
  return bytes_of({.kind = Kind::kUnknown, .id = std::get<BlobUnknown>(message).id});
}

Result<BlobMessage> parse_blob_message(std::span<const std::byte> part, uint64_t piece_bytes) {
  BlobHead head;
  if (part.size() != sizeof head) return malformed_blob("it is " + std::to_string(part.size()) + " bytes long");
  std::memcpy(&head, part.data(), sizeof head);
  if (head.magic != kBlobMagic) return malformed_blob("its magic number is wrong");
  if (head.version != kBlobVersion) {
    return Fault{Errc::kMismatch, "a message about a blob of a job has version " + std::to_string(head.version) +
                                      ", but this process uses version " + std::to_string(kBlobVersion) +
                                      "; run the same version of penstock on both sides"};
  }
  if (head.reserved != 0 || head.reserved_end != 0) return malformed_blob("reserved bytes are not zero");
  if ((head.kind == Kind::kPiece) != (piece_bytes > 0))
    return malformed_blob("a chunk and its bytes must be sent together");
  switch (head.kind) {
    case Kind::kRequest:
      if (head.total_bytes != 0) return malformed_blob("a request must not have a size");
      if (head.offset >= kBlobBytesMax) return malformed_blob("a request is beyond the maximum blob size");
      return BlobMessage(BlobRequest{.id = head.id, .offset = head.offset});
    case Kind::kPiece:
      if (piece_bytes > kBlobPieceBytesMax || head.total_bytes > kBlobBytesMax || head.offset > head.total_bytes ||
          piece_bytes > head.total_bytes - head.offset)
        return malformed_blob("a chunk lies outside its blob");
      return BlobMessage(BlobPiece{.id = head.id, .offset = head.offset, .total_bytes = head.total_bytes});
    case Kind::kUnknown:
      if (head.offset != 0 || head.total_bytes != 0) return malformed_blob("a missing blob must not have a size");
      return BlobMessage(BlobUnknown{.id = head.id});
  }
  return malformed_blob("unknown kind " + std::to_string(static_cast<int>(head.kind)));
}

namespace {

Fault malformed_shipment(std::string_view reason) { return malformed("the list of lazy tensors", reason); }

}  // namespace

bool is_shipment(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  return reader.read<uint32_t>() == kShipmentMagic && reader.ok();
}

std::vector<std::byte> write_shipment(const Shipment& shipment) {
  PENSTOCK_ASSERT(shipment.boundary_keys.size() <= kShipmentListMax);
  ByteWriter writer;
  writer.write(kShipmentMagic);
  writer.write(static_cast<uint32_t>(shipment.boundary_keys.size()));
  writer.write(shipment.whole_every);
  for (const auto& keys : shipment.boundary_keys) {
    writer.write(static_cast<uint32_t>(keys.size()));
    for (const std::string& key : keys) {
      PENSTOCK_ASSERT(key.size() == kBoundaryKeyBytes, "a boundary key of ", key.size(), " characters");
      writer.write_text(key);
    }
  }
  writer.write(static_cast<uint32_t>(shipment.withheld.size()));
  for (const uint32_t leaf : shipment.withheld) writer.write(leaf);
  return writer.take();
}

Result<Shipment> parse_shipment(std::span<const std::byte> bytes) {
  if (bytes.size() > kShipmentBytesMax) {
    return Fault{Errc::kTooLarge, "the list of lazy tensors has " + std::to_string(bytes.size()) +
                                      " bytes, above the cap of " + std::to_string(kShipmentBytesMax)};
  }
  ByteReader reader(bytes);
  if (reader.read<uint32_t>() != kShipmentMagic) return malformed_shipment("it does not start with PNS1");
  const auto list_count = reader.read<uint32_t>();
  Shipment shipment;
  shipment.whole_every = reader.read<uint64_t>();
  if (!reader.ok() || list_count > kShipmentListMax) return malformed_shipment("its head");
  for (uint32_t list = 0; list < list_count; ++list) {
    const auto key_count = reader.read<uint32_t>();
    if (!reader.ok() || key_count == 0 || reader.remaining() / kBoundaryKeyBytes < key_count)
      return malformed_shipment("a list of boundary keys");
    auto& keys = shipment.boundary_keys.emplace_back();
    for (uint32_t key = 0; key < key_count; ++key) keys.emplace_back(reader.take_text(kBoundaryKeyBytes));
  }
  const auto leaf_count = reader.read<uint32_t>();
  if (!reader.ok() || leaf_count > kTensorCountMax || reader.remaining() != leaf_count * sizeof(uint32_t))
    return malformed_shipment("its leaves");
  for (uint32_t leaf = 0; leaf < leaf_count; ++leaf) shipment.withheld.push_back(reader.read<uint32_t>());
  return shipment;
}

namespace {

// Reads the expected tokens; fails permanently at the first error.
class PrefixReader {
 public:
  explicit PrefixReader(std::span<const std::byte> nest) : nest_(nest) {}

  bool is_whole() const { return ok_ && nest_.at_end(); }

  NestToken take(NestTag tag) {
    if (!ok_) return {};
    const auto token = nest_.next();
    ok_ = token && token.value().tag == tag;
    return ok_ ? token.value() : NestToken{};
  }

  bool tuple(uint32_t count) {
    ok_ = take(NestTag::kTuple).count == count && ok_;
    return ok_;
  }

  int64_t integer() { return take(NestTag::kInteger).integer; }

  std::vector<int64_t> integers() {
    std::vector<int64_t> values;
    for (uint32_t left = take(NestTag::kList).count; left > 0 && ok_; --left) values.push_back(integer());
    return values;
  }

  std::vector<PrefixLeaf> leaves() {
    std::vector<PrefixLeaf> leaves;
    for (uint32_t left = take(NestTag::kList).count; left > 0 && tuple(4); --left) {
      const int64_t leaf_index = integer();
      const int64_t dtype = integer();
      auto sizes = integers();
      auto strides = integers();
      ok_ = ok_ && leaf_index >= 0 && leaf_index < kTensorCountMax && dtype >= 0 && dtype <= 255 &&
            dtype_bytes(static_cast<DTypeCode>(dtype)) > 0;
      if (!ok_) break;
      leaves.push_back({.leaf_index = static_cast<uint32_t>(leaf_index),
                        .dtype = static_cast<DTypeCode>(dtype),
                        .sizes = std::move(sizes),
                        .strides = std::move(strides)});
    }
    return leaves;
  }

  Numerics numerics() {
    Numerics numerics{};
    const std::string_view bytes = take(NestTag::kBytes).text;
    ok_ = ok_ && bytes.size() == sizeof numerics;
    if (ok_) std::memcpy(&numerics, bytes.data(), sizeof numerics);
    return numerics;
  }

  PrefixSettings settings() {
    tuple(6);
    PrefixSettings settings;
    settings.flushes_denormals = integer_to(1) == 1;
    settings.is_deterministic = integer_to(1) == 1;
    settings.uses_mkldnn = integer_to(1) == 1;
    settings.matmul_precision = static_cast<uint8_t>(integer_to(kPrecisionMax));
    settings.convolution_precision = static_cast<uint8_t>(integer_to(kPrecisionMax));
    settings.default_dtype = static_cast<DTypeCode>(integer_to(255));
    ok_ = ok_ && dtype_bytes(settings.default_dtype) > 0;
    return settings;
  }

 private:
  static constexpr int64_t kPrecisionMax = 5;

  int64_t integer_to(int64_t max) {
    const int64_t value = integer();
    ok_ = ok_ && value >= 0 && value <= max;
    return value;
  }

  NestReader nest_;
  bool ok_ = true;
};

void write_integers(NestWriter& nest, std::span<const int64_t> values) {
  nest.list(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) nest.integer(value);
}

}  // namespace

std::vector<std::byte> write_prefix_body(const PrefixBody& body) {
  NestWriter nest;
  nest.tuple(6);
  nest.text(body.text);
  nest.integer(std::bit_cast<int64_t>(body.seed));
  nest.bytes(body.library);
  nest.list(static_cast<uint32_t>(body.library_leaves.size()));
  for (const PrefixLeaf& leaf : body.library_leaves) {
    nest.tuple(4);
    nest.integer(leaf.leaf_index);
    nest.integer(leaf.dtype);
    write_integers(nest, leaf.sizes);
    write_integers(nest, leaf.strides);
  }
  nest.bytes({reinterpret_cast<const char*>(body.numerics.data()), sizeof(Numerics)});
  const PrefixSettings& settings = body.settings;
  nest.tuple(6);
  for (const int64_t value :
       {int64_t{settings.flushes_denormals}, int64_t{settings.is_deterministic}, int64_t{settings.uses_mkldnn},
        int64_t{settings.matmul_precision}, int64_t{settings.convolution_precision}, int64_t{settings.default_dtype}})
    nest.integer(value);
  Frame frame{.tensors = {}, .boundary_keys = {}, .nest = nest.view()};
  std::vector<std::span<const std::byte>> sources;
  for (const PrefixConstant& constant : body.constants) {
    frame.tensors.push_back(constant.entry);
    sources.push_back(constant.bytes);
  }
  return write_packed_record(std::move(frame), sources);
}

Result<PrefixBody> parse_prefix_body(std::span<const std::byte> bytes) {
  auto packed = parse_packed_record(bytes);
  if (!packed) return packed.error();
  PrefixReader nest(packed.value().frame.nest);
  PrefixBody body;
  nest.tuple(6);
  body.text = nest.take(NestTag::kText).text;
  body.seed = std::bit_cast<uint64_t>(nest.integer());
  body.library = nest.take(NestTag::kBytes).text;
  body.library_leaves = nest.leaves();
  body.numerics = nest.numerics();
  body.settings = nest.settings();
  if (!nest.is_whole()) return malformed("a message with a prefix", "its nest does not describe a prefix");
  for (TensorEntry& entry : packed.value().frame.tensors) {
    const auto constant = packed.value().bytes_of(entry);
    body.constants.push_back({.entry = std::move(entry), .bytes = constant});
  }
  return body;
}

}  // namespace penstock::wire
