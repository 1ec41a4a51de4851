// SPDX-License-Identifier: Apache-2.0
// The body of a prefix request, as a worker reads it of a trainer.
#include "wire/blob_record.h"

#include <algorithm>

#include "fuzz_target.h"
#include "record_repair.h"
#include "record_samples.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kTextBytesWanted = 30;

void repair_text(Source& source, wire::NestTag tag, ByteWriter& nest, Choices& choices) {
  source.number<uint8_t>();
  const auto most = static_cast<uint32_t>(std::min(source.left(), kTextBytesWanted));
  const auto length = mostly_at_most(source.number<uint32_t>(), most, choices);
  const auto text = source.take(length);
  nest.write(tag);
  nest.write(choices.mostly() ? static_cast<uint32_t>(text.size()) : length);
  nest.write_bytes(text);
}

void repair_numerics(Source& source, ByteWriter& nest, Choices& choices) {
  source.number<uint8_t>();
  const auto length = source.number<uint32_t>();
  Bytes numerics(choices.mostly() ? sizeof(Numerics) : length % (2 * sizeof(Numerics)));
  std::ranges::copy(source.take(numerics.size()), numerics.begin());
  nest.write(wire::NestTag::kBytes);
  nest.write(static_cast<uint32_t>(numerics.size()));
  nest.write_bytes(numerics);
}

int64_t repair_integer(Source& source, int64_t most, ByteWriter& nest, Choices& choices) {
  source.number<uint8_t>();
  auto value = source.number<int64_t>();
  if ((value < 0 || value > most) && choices.mostly()) value = static_cast<int64_t>(choices.below(12));
  nest.write(wire::NestTag::kInteger);
  nest.write(value);
  return value;
}

uint32_t repair_count(Source& source, wire::NestTag tag, ByteWriter& nest, Choices& choices) {
  source.number<uint8_t>();
  const auto count = mostly_at_most<uint32_t>(source.number<uint32_t>(), 3, choices);
  nest.write(tag);
  nest.write(count);
  return std::min<uint32_t>(count, 8);
}

void write_tuple(uint32_t length, Source& source, ByteWriter& nest, Choices& choices) {
  source.number<uint8_t>();
  const auto count = source.number<uint32_t>();
  nest.write(wire::NestTag::kTuple);
  nest.write(choices.mostly() ? length : count);
}

Bytes repair_prefix_nest(Source& source, uint32_t leaf_count, Choices& choices) {
  if (!choices.mostly()) return repair_nest(source, leaf_count, choices);
  ByteWriter nest;
  write_tuple(6, source, nest, choices);
  repair_text(source, wire::NestTag::kText, nest, choices);
  repair_integer(source, INT64_MAX, nest, choices);
  repair_text(source, wire::NestTag::kBytes, nest, choices);
  for (uint32_t leaf = repair_count(source, wire::NestTag::kList, nest, choices); leaf > 0; --leaf) {
    write_tuple(4, source, nest, choices);
    repair_integer(source, wire::kTensorCountMax - 1, nest, choices);
    repair_integer(source, 11, nest, choices);
    for (int list = 0; list < 2; ++list) {
      for (uint32_t left = repair_count(source, wire::NestTag::kList, nest, choices); left > 0; --left) {
        repair_integer(source, INT64_MAX, nest, choices);
      }
    }
  }
  repair_numerics(source, nest, choices);
  write_tuple(6, source, nest, choices);
  for (const int64_t most : {1, 1, 1, 5, 5, 11}) repair_integer(source, most, nest, choices);
  if (!choices.mostly()) nest.write_bytes(source.take(source.left()));
  return nest.take();
}

bool is_same(const wire::PrefixBody& a, const wire::PrefixBody& b) {
  const auto is_same_constant = [](const wire::PrefixConstant& left, const wire::PrefixConstant& right) {
    // A writer lays the constants out one after the other, whatever lay between them.
    wire::TensorEntry moved = left.entry;
    moved.offset = right.entry.offset;
    return moved == right.entry && std::ranges::equal(left.bytes, right.bytes);
  };
  return a.text == b.text && a.seed == b.seed && a.library == b.library && a.library_leaves == b.library_leaves &&
         a.numerics == b.numerics && a.settings == b.settings &&
         std::ranges::equal(a.constants, b.constants, is_same_constant);
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const Bytes numbers(64, std::byte{7});
  const wire::PrefixConstant row{.entry = wire::make_entry(wire::kDTypeFloat32, {4}),
                                 .bytes = std::span(numbers).first(16)};
  const wire::PrefixConstant nothing{.entry = wire::make_entry(4, {0, 3}), .bytes = {}};
  const wire::PrefixLeaf leaf{.leaf_index = 1, .dtype = 0, .sizes = {3, 4}, .strides = {4, 1}};
  return {
      wire::write_prefix_body({.text = "", .seed = 0, .library = "", .library_leaves = {}, .constants = {}}),
      wire::write_prefix_body(
          {.text = "text", .seed = 5, .library = "", .library_leaves = {}, .constants = {row, nothing}}),
      wire::write_prefix_body(
          {.text = "t", .seed = ~0ul, .library = "library", .library_leaves = {leaf, leaf}, .constants = {row}}),
  };
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (!choices.mostly()) return;
  Source source(bytes);
  const auto record_bytes = source.number<uint64_t>();
  const Bytes record = repair_record(source.take(record_bytes), &repair_prefix_nest, choices);
  uint64_t payload_bytes = 0;  // where frame.cpp's header has it
  std::memcpy(&payload_bytes, record.data() + 16, sizeof payload_bytes);
  ByteWriter writer;
  writer.write(choices.mostly() ? uint64_t{record.size()} : record_bytes);
  writer.write_bytes(record);
  while (writer.size() % wire::kPayloadAlignment != 0) writer.write(uint8_t{0});
  const size_t payload_offset = writer.size();
  writer.write_bytes(source.take(source.left()));
  bytes = writer.take();  // the memory that the source viewed is gone
  if (choices.mostly()) bytes.resize(payload_offset + std::min(payload_bytes, wire::kPayloadBytesMax));
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_prefix_body(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::PrefixBody& body = parsed.value();
  touch(std::as_bytes(std::span(body.text)));
  touch(std::as_bytes(std::span(body.library)));
  for (const wire::PrefixLeaf& leaf : body.library_leaves) {
    expect(leaf.leaf_index < wire::kTensorCountMax && dtype_bytes(leaf.dtype) > 0, "a leaf is a tensor of a batch");
  }
  for (const wire::PrefixConstant& constant : body.constants) {
    expect(constant.bytes.size() == constant.entry.bytes, "a constant has the bytes of its entry");
    for (const std::byte& byte : constant.bytes) touch({&byte, 1});
  }
  const Bytes written = wire::write_prefix_body(body);
  const auto again = wire::parse_prefix_body(written);
  expect(again && is_same(body, again.value()), "a prefix that is written again reads the same");
  return true;
}

}  // namespace penstock::fuzz
