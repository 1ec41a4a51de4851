// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_message.h"

#include <ATen/ops/empty_strided.h>

#include <bit>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "transport/frame.h"
#include "transport/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

using transport::kPayloadAlignment;

namespace {

// Reads what is expected, or fails for good.
class PrefixReader {
 public:
  explicit PrefixReader(std::span<const std::byte> nest) : nest_(nest) {}

  bool is_whole() const { return ok_ && nest_.at_end(); }

  transport::NestToken take(transport::NestTag tag) {
    if (!ok_) return {};
    const auto token = nest_.next();
    ok_ = token && token.value().tag == tag;
    return ok_ ? token.value() : transport::NestToken{};
  }

  bool tuple(uint32_t count) {
    ok_ = take(transport::NestTag::kTuple).count == count && ok_;
    return ok_;
  }

  int64_t integer() { return take(transport::NestTag::kInteger).integer; }

  std::vector<int64_t> integers() {
    std::vector<int64_t> values;
    for (uint32_t left = take(transport::NestTag::kList).count; left > 0 && ok_; --left) values.push_back(integer());
    return values;
  }

  std::vector<runtime::LeafLayout> layouts() {
    std::vector<runtime::LeafLayout> layouts;
    for (uint32_t left = take(transport::NestTag::kList).count; left > 0 && tuple(4); --left) {
      const int64_t leaf_index = integer();
      const int64_t dtype = integer();
      auto sizes = integers();
      auto strides = integers();
      ok_ = ok_ && leaf_index >= 0 && leaf_index < transport::kTensorCountMax && dtype >= 0 &&
            dtype < static_cast<int64_t>(at::ScalarType::NumOptions);
      if (!ok_) break;
      layouts.push_back({.leaf_index = static_cast<uint32_t>(leaf_index),
                         .dtype = static_cast<at::ScalarType>(dtype),
                         .sizes = std::move(sizes),
                         .strides = std::move(strides)});
    }
    return layouts;
  }

 private:
  transport::NestReader nest_;
  bool ok_ = true;
};

void write_integers(transport::NestWriter& nest, std::span<const int64_t> values) {
  nest.list(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) nest.integer(value);
}

}  // namespace

Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& prefix) {
  const std::vector<at::Tensor>& constants = prefix.constants;
  transport::NestWriter nest;
  nest.tuple(4);
  nest.text(prefix.text);
  nest.integer(std::bit_cast<int64_t>(prefix.seed));
  nest.bytes(prefix.library);
  nest.list(static_cast<uint32_t>(prefix.library_leaves.size()));
  for (const runtime::LeafLayout& leaf : prefix.library_leaves) {
    nest.tuple(4);
    nest.integer(leaf.leaf_index);
    nest.integer(static_cast<int64_t>(leaf.dtype));
    write_integers(nest, leaf.sizes);
    write_integers(nest, leaf.strides);
  }
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
  PrefixReader nest(frame.value().nest);
  PrefixMessage prefix;
  nest.tuple(4);
  prefix.text = nest.take(transport::NestTag::kText).text;
  prefix.seed = std::bit_cast<uint64_t>(nest.integer());
  prefix.library = nest.take(transport::NestTag::kBytes).text;
  prefix.library_leaves = nest.layouts();
  if (!nest.is_whole()) return malformed;
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
