// SPDX-License-Identifier: Apache-2.0
#include "record_repair.h"

#include <string>

#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kNestBytesWanted = 400;  // of what is made here; its cap in this build is a little above
constexpr size_t kNumberWanted = 12;      // sizes and strides stay small enough for tensors within the payload's cap

struct RepairedTable {
  Bytes bytes;
  uint64_t payload_bytes = 0;
  uint32_t file_count = 0;  // in shared memory
};

int64_t repair_number(int64_t number, Choices& choices) {
  const bool is_small = number >= 0 && number <= static_cast<int64_t>(kNumberWanted);
  return is_small || !choices.mostly() ? number : static_cast<int64_t>(choices.below(kNumberWanted));
}

void repair_entry(Source& source, RepairedTable& table, Choices& choices) {
  auto dtype = source.number<wire::DTypeCode>();
  if (wire::dtype_bytes(dtype) == 0 && choices.mostly()) dtype = choices.one_of<wire::DTypeCode>({0, 4, 6, 10, 15});
  const auto dim_count = mostly_at_most<uint8_t>(source.number<uint8_t>(), wire::kDimCountMax, choices);
  auto encoding = source.number<uint8_t>();
  if (choices.mostly()) encoding = choices.one_of<uint8_t>({0, 0, 0, 1, static_cast<uint8_t>(encoding % 10)});
  const auto reserved = source.number<uint8_t>();
  auto file_index = source.number<uint32_t>();
  auto offset = source.number<uint64_t>();
  auto entry_bytes = source.number<uint64_t>();
  std::vector<int64_t> shape(dim_count);
  std::vector<int64_t> strides(dim_count);
  for (int64_t& size : shape) size = repair_number(source.number<int64_t>(), choices);
  for (int64_t& stride : strides) stride = repair_number(source.number<int64_t>(), choices);
  if (const auto right = wire::span_bytes(dtype, shape, strides); right && choices.mostly())
    entry_bytes = right.value();
  const bool is_withheld = encoding == static_cast<uint8_t>(wire::Encoding::kWithheld);
  if (is_withheld && choices.mostly()) entry_bytes = offset = 0;
  if (entry_bytes > table.payload_bytes && choices.mostly()) {
    table.payload_bytes = std::min(align_up(entry_bytes, wire::kPayloadAlignment), wire::kPayloadBytesMax);
  }
  if (choices.mostly()) offset &= ~(wire::kPayloadAlignment - 1);
  const bool is_shared = encoding == static_cast<uint8_t>(wire::Encoding::kShared);
  if (!is_shared && choices.mostly()) encoding = 0;
  if (choices.mostly()) file_index = is_shared ? std::min(file_index, table.file_count) : 0;
  if (is_shared) table.file_count = std::max(table.file_count, file_index + 1);
  if (offset + entry_bytes > table.payload_bytes && entry_bytes <= table.payload_bytes && choices.mostly()) {
    offset = (table.payload_bytes - entry_bytes) & ~(wire::kPayloadAlignment - 1);
  }
  ByteWriter writer;
  writer.write(dtype);
  writer.write(dim_count);
  writer.write(encoding);
  writer.write<uint8_t>(choices.mostly() ? 0 : reserved);
  writer.write(file_index);
  writer.write(offset);
  writer.write(entry_bytes);
  for (const int64_t size : shape) writer.write(size);
  for (const int64_t stride : strides) writer.write(stride);
  table.bytes.insert(table.bytes.end(), writer.bytes().begin(), writer.bytes().end());
}

// A dtype for an array or a scalar. The source's own is kept when it is short, so that edits of it are seen.
std::string repair_dtype(Source& source, bool may_be_none, Choices& choices) {
  const auto length = source.number<uint8_t>();
  const auto taken = source.take(mostly_at_most<size_t>(length, 12, choices));
  const std::string text(reinterpret_cast<const char*>(taken.data()), taken.size());
  if (!choices.mostly() || wire::array_item_bytes(text) || (may_be_none && text.empty())) return text;
  return choices.one_of<const char*>({"<U2", "|S3", "<i4", ">f8", "<M8[ns]", "|b1", "<U0"});
}

void repair_scalar(Source& source, ByteWriter& nest, Choices& choices) {
  const std::string dtype = repair_dtype(source, /*may_be_none=*/false, choices);
  const auto length = source.number<uint32_t>();
  std::string element(choices.mostly() ? wire::array_item_bytes(dtype).value_or(0) % 64 : length % 64, '\0');
  const auto taken = source.take(element.size());
  std::ranges::transform(taken, element.begin(), [](std::byte byte) { return static_cast<char>(byte); });
  nest.write(wire::NestTag::kScalar);
  nest.write(static_cast<uint8_t>(dtype.size()));
  nest.write_text(dtype);
  nest.write(choices.mostly() ? static_cast<uint32_t>(element.size()) : length);
  nest.write_text(element);
}

void repair_array(Source& source, uint32_t leaf_count, ByteWriter& nest, Choices& choices) {
  const auto index = source.number<uint32_t>();
  const std::string dtype = repair_dtype(source, /*may_be_none=*/true, choices);
  nest.write(wire::NestTag::kArray);
  nest.write(leaf_count > 0 && choices.mostly() ? index % leaf_count : index);
  nest.write(static_cast<uint8_t>(dtype.size()));
  nest.write_text(dtype);
}

void repair_text(Source& source, ByteWriter& nest, Choices& choices) {
  const auto length = mostly_at_most<uint32_t>(source.number<uint32_t>(),
                                               static_cast<uint32_t>(std::min<size_t>(source.left(), 40)), choices);
  nest.write(length);
  nest.write_bytes(source.take(length));
}

uint32_t repair_count(Source& source, ByteWriter& nest, Choices& choices) {
  const auto count = mostly_at_most<uint32_t>(source.number<uint32_t>(), 4, choices);
  nest.write(count);
  return count;
}

}  // namespace

Bytes repair_nest(Source& source, uint32_t leaf_count, Choices& choices) {
  ByteWriter nest;
  std::vector<uint64_t> open{1};  // values still to come, innermost container last
  while (!open.empty() && nest.size() < 2 * kNestBytesWanted) {
    if (open.back() == 0) {
      open.pop_back();
      continue;
    }
    --open.back();
    const bool is_room_left = source.left() > 0 && nest.size() < kNestBytesWanted;
    auto tag = is_room_left ? source.number<uint8_t>() : uint8_t{0};
    tag = mostly_at_most(tag, static_cast<uint8_t>(wire::NestTag::kObject), choices);
    const bool is_container =
        (tag >= static_cast<uint8_t>(wire::NestTag::kList) && tag <= static_cast<uint8_t>(wire::NestTag::kDict)) ||
        tag == static_cast<uint8_t>(wire::NestTag::kNamedTuple) || tag == static_cast<uint8_t>(wire::NestTag::kObject);
    if (is_container && open.size() >= wire::kNestDepthMax && choices.mostly()) tag = 0;
    if (static_cast<wire::NestTag>(tag) == wire::NestTag::kScalar) {
      repair_scalar(source, nest, choices);
      continue;
    }
    if (static_cast<wire::NestTag>(tag) == wire::NestTag::kArray) {
      repair_array(source, leaf_count, nest, choices);
      continue;
    }
    nest.write(tag);
    switch (static_cast<wire::NestTag>(tag)) {
      case wire::NestTag::kInteger:
      case wire::NestTag::kFloat: nest.write(source.number<uint64_t>()); break;
      case wire::NestTag::kText:
      case wire::NestTag::kBytes:
      case wire::NestTag::kBigInteger:
      case wire::NestTag::kPickle: repair_text(source, nest, choices); break;
      case wire::NestTag::kNamedTuple:
      case wire::NestTag::kObject:
        repair_text(source, nest, choices);
        open.push_back(repair_count(source, nest, choices));
        break;
      case wire::NestTag::kList:
      case wire::NestTag::kTuple: open.push_back(repair_count(source, nest, choices)); break;
      case wire::NestTag::kDict: open.push_back(uint64_t{repair_count(source, nest, choices)} * 2); break;
      case wire::NestTag::kTensor: {
        const auto index = source.number<uint32_t>();
        nest.write(leaf_count > 0 && choices.mostly() ? index % leaf_count : index);
        break;
      }
      default: break;
    }
  }
  if (!choices.mostly()) nest.write_bytes(source.take(source.left()));
  return nest.take();
}

Bytes repair_record(std::span<const std::byte> record, RepairNest repair_nest, Choices& choices) {
  Source source(record);
  const auto magic = source.number<uint32_t>();
  const auto version = source.number<uint16_t>();
  const auto reserved = source.number<uint16_t>();
  const auto tensor_count = mostly_at_most(source.number<uint32_t>(), wire::kTensorCountMax, choices);
  const auto boundary_count = mostly_at_most(source.number<uint32_t>(), tensor_count, choices);
  RepairedTable table{.bytes = {},
                      .payload_bytes = mostly_at_most(source.number<uint64_t>(), wire::kPayloadBytesMax, choices)};
  const auto nest_bytes = source.number<uint32_t>();
  const auto table_bytes = source.number<uint32_t>();
  // A count that was left too large is not followed by as many.
  for (uint32_t index = 0; index < std::min(tensor_count, wire::kTensorCountMax + 1); ++index) {
    repair_entry(source, table, choices);
  }
  Bytes keys(size_t{std::min(boundary_count, wire::kTensorCountMax + 1)} * wire::kBoundaryKeyBytes, std::byte{'0'});
  const auto key_bytes = source.take(keys.size());
  std::ranges::copy(key_bytes, keys.begin());
  const Bytes nest = repair_nest(source, tensor_count - std::min(boundary_count, tensor_count), choices);
  ByteWriter writer;
  writer.write(choices.mostly() ? wire::kFrameMagic : magic);
  writer.write(choices.mostly() ? wire::kFrameVersion : version);
  writer.write(choices.mostly() ? uint16_t{0} : reserved);
  writer.write(tensor_count);
  writer.write(boundary_count);
  writer.write(table.payload_bytes);
  writer.write(choices.mostly() ? static_cast<uint32_t>(nest.size()) : nest_bytes);
  writer.write(choices.mostly() ? static_cast<uint32_t>(table.bytes.size()) : table_bytes);
  writer.write_bytes(table.bytes);
  writer.write_bytes(keys);
  writer.write_bytes(nest);
  return writer.take();
}

}  // namespace penstock::fuzz
