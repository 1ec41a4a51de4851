// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_message.h"

#include <ATen/ops/empty_strided.h>

#include <bit>
#include <cstring>

#include "base/bytes.h"
#include "transport/frame.h"
#include "transport/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

using transport::kPayloadAlignment;

Result<std::vector<std::byte>> write_prefix_message(std::string_view text, std::span<const at::Tensor> constants,
                                                    uint64_t seed) {
  transport::NestWriter nest;
  nest.tuple(2);
  nest.text(text);
  nest.integer(std::bit_cast<int64_t>(seed));
  transport::Frame frame{.tensors = {}, .boundary_keys = {}, .nest = nest.view()};
  for (const at::Tensor& constant : constants) {
    if (!is_plain_tensor(constant)) {
      return Error{Errc::kMismatch, "a constant of a prefix is not a plain CPU tensor; only those travel to workers"};
    }
    transport::TensorEntry entry = describe_tensor(constant);
    entry.offset = frame.payload_bytes;
    frame.payload_bytes = align_up(entry.offset + entry.bytes, kPayloadAlignment);
    frame.tensors.push_back(std::move(entry));
  }
  const std::vector<std::byte> record = transport::write_frame(frame);
  const uint64_t payload_offset = align_up(sizeof(uint64_t) + record.size(), kPayloadAlignment);
  std::vector<std::byte> message(payload_offset + frame.payload_bytes);
  const uint64_t record_bytes = record.size();
  std::memcpy(message.data(), &record_bytes, sizeof record_bytes);
  std::memcpy(message.data() + sizeof record_bytes, record.data(), record.size());
  for (size_t index = 0; index < constants.size(); ++index) {
    const transport::TensorEntry& entry = frame.tensors[index];
    if (entry.bytes == 0) continue;
    std::memcpy(message.data() + payload_offset + entry.offset, constants[index].const_data_ptr(), entry.bytes);
  }
  return message;
}

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message) {
  const Error malformed{Errc::kMalformed,
                        "a prefix message is malformed; trainer and workers must run the same version of penstock"};
  ByteReader reader(message);
  const auto record_bytes = reader.read<uint64_t>();
  const auto record = reader.take(record_bytes);
  if (!reader.ok()) return malformed;
  auto frame = transport::parse_frame(record);
  if (!frame) return frame.error();
  const uint64_t payload_offset = align_up(reader.position(), kPayloadAlignment);
  if (message.size() < payload_offset || message.size() - payload_offset != frame.value().payload_bytes) {
    return malformed;
  }
  transport::NestReader nest(frame.value().nest);
  const auto is_next = [&](transport::NestTag tag, transport::NestToken& token) {
    const auto read = nest.next();
    if (read) token = read.value();
    return read && token.tag == tag;
  };
  transport::NestToken pair{};
  transport::NestToken text{};
  transport::NestToken seed{};
  const bool is_whole = is_next(transport::NestTag::kTuple, pair) && pair.count == 2 &&
                        is_next(transport::NestTag::kText, text) && is_next(transport::NestTag::kInteger, seed) &&
                        nest.at_end();
  if (!is_whole) return malformed;
  PrefixMessage prefix{.text = std::string(text.text), .constants = {}, .seed = std::bit_cast<uint64_t>(seed.integer)};
  for (const transport::TensorEntry& entry : frame.value().tensors) {
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(entry.dtype));
    at::Tensor constant = at::empty_strided(entry.shape, entry.strides, options);
    if (constant.storage().nbytes() != entry.bytes) return malformed;
    if (entry.bytes > 0) {
      std::memcpy(constant.mutable_data_ptr(), message.data() + payload_offset + entry.offset, entry.bytes);
    }
    prefix.constants.push_back(std::move(constant));
  }
  return prefix;
}

}  // namespace penstock::worker
