// SPDX-License-Identifier: Apache-2.0
#include "wire/packed_record.h"

#include <cstring>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "wire/malformed.h"

namespace penstock::wire {
namespace {

Fault malformed_packed(std::string_view reason) { return malformed("a batch record with its payload", reason); }

}  // namespace

std::vector<std::byte> write_packed_record(Frame frame, std::span<const std::span<const std::byte>> sources) {
  PENSTOCK_ASSERT(sources.size() == frame.tensors.size(), sources.size(), " tensors for the table");
  frame.payload_bytes = 0;
  for (TensorEntry& entry : frame.tensors) {
    entry.offset = frame.payload_bytes;
    frame.payload_bytes = align_up(entry.offset + entry.bytes, kPayloadAlignment);
  }
  const std::vector<std::byte> record = write_frame(frame);
  const uint64_t payload_offset = align_up(sizeof(uint64_t) + record.size(), kPayloadAlignment);
  std::vector<std::byte> bytes(payload_offset + frame.payload_bytes);
  const uint64_t record_bytes = record.size();
  std::memcpy(bytes.data(), &record_bytes, sizeof record_bytes);
  std::memcpy(bytes.data() + sizeof record_bytes, record.data(), record.size());
  for (size_t index = 0; index < sources.size(); ++index) {
    const TensorEntry& entry = frame.tensors[index];
    PENSTOCK_ASSERT(sources[index].size() == entry.bytes, "a tensor of ", sources[index].size(), " bytes");
    if (entry.bytes == 0) continue;
    std::memcpy(bytes.data() + payload_offset + entry.offset, sources[index].data(), entry.bytes);
  }
  return bytes;
}

Result<PackedRecord> parse_packed_record(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  PackedRecord packed;
  packed.record = reader.take(reader.read<uint64_t>());
  if (!reader.ok()) return malformed_packed("it ends inside the record");
  auto frame = parse_frame(packed.record);
  if (!frame) return frame.error();
  packed.frame = std::move(frame).value();
  const uint64_t payload_offset = align_up(reader.position(), kPayloadAlignment);
  if (bytes.size() < payload_offset || bytes.size() - payload_offset != packed.frame.payload_bytes) {
    return malformed_packed("its payload length does not match the record");
  }
  packed.payload = bytes.subspan(payload_offset);
  uint64_t tensor_bytes = 0;
  for (const TensorEntry& entry : packed.frame.tensors) {
    if (entry.encoding != Encoding::kPlain) return malformed_packed("one of its tensors is compressed, lazy or shared");
    tensor_bytes += entry.bytes;
  }
  if (tensor_bytes > packed.frame.payload_bytes) return malformed_packed("its tensors overlap");
  return packed;
}

}  // namespace penstock::wire
