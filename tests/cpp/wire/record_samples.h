// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batch records for tests: entries with strides as torch makes them, and frames that own the memory that they view.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::wire {

inline std::vector<int64_t> contiguous_strides(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0; stride *= std::max<int64_t>(shape[dim], 1)) strides[dim] = stride;
  return strides;
}

inline TensorEntry make_entry(DTypeCode dtype, std::vector<int64_t> shape, std::vector<int64_t> strides) {
  TensorEntry entry{.dtype = dtype, .shape = std::move(shape), .strides = std::move(strides)};
  entry.bytes = span_bytes(dtype, entry.shape, entry.strides).value();
  return entry;
}

inline TensorEntry make_entry(DTypeCode dtype, std::vector<int64_t> shape) {
  auto strides = contiguous_strides(shape);
  return make_entry(dtype, std::move(shape), std::move(strides));
}

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Three float32 in a file in shared memory.
inline TensorEntry shared_entry(uint32_t file_index, uint64_t offset) {
  TensorEntry entry = make_entry(6, {3});
  entry.encoding = Encoding::kShared;
  entry.file_index = file_index;
  entry.offset = offset;
  return entry;
}

// The record of `entries`, which are laid out one after the other, the last of them under `keys`.
inline std::vector<std::byte> make_record(std::vector<TensorEntry> entries, std::span<const std::byte> nest,
                                          std::vector<std::string_view> keys = {}) {
  Frame frame{.tensors = std::move(entries), .boundary_keys = std::move(keys), .nest = nest};
  for (TensorEntry& entry : frame.tensors) {
    if (entry.encoding == Encoding::kShared) continue;
    entry.offset = frame.payload_bytes;
    frame.payload_bytes = align_up(entry.offset + entry.bytes, kPayloadAlignment);
  }
  return write_frame(frame);
}

inline std::vector<std::byte> nest_of_tensors(uint32_t count) {
  NestWriter nest;
  nest.list(count);
  for (uint32_t index = 0; index < count; ++index) nest.tensor(index);
  const auto bytes = nest.view();
  return {bytes.begin(), bytes.end()};
}

constexpr std::string_view kSomeKey = "0123456789abcdef0123456789abcdef";

// Records that together use every field of the format.
inline std::vector<std::vector<std::byte>> sample_records() {
  NestWriter rich;
  rich.dict(3);
  rich.text("image"), rich.tensor(0);
  rich.text("label"), rich.tuple(2), rich.integer(-5), rich.floating(0.5);
  rich.bytes("k"), rich.list(3), rich.none(), rich.boolean(true), rich.pickle("\x80\x05.");
  NestWriter plain;
  plain.object("m:B", 2), plain.none();
  plain.named_tuple("m:A", 4);
  plain.array(0, ""), plain.array(1, "<U5"), plain.scalar("<i4", "four"), plain.big_integer("012345678");
  NestWriter none;
  none.none();
  const auto some = nest_of_tensors(2);
  return {
      make_record({}, none.view()),
      make_record({make_entry(6, {1, 2})}, nest_of_tensors(1)),
      make_record({make_entry(0, {2, 3, 4}, {1, 8, 2}), make_entry(4, {}), make_entry(10, {0, 7})}, some, {kSomeKey}),
      make_record({make_entry(15, {3, 1, 5}, {0, 9, 1}), make_entry(11, {70})}, rich.view(), {kSomeKey}),
      make_record({make_entry(7, {2}), make_entry(0, {3, 20})}, plain.view()),
      make_record({shared_entry(0, 4), make_entry(6, {1}), shared_entry(1, 8)}, nest_of_tensors(3)),
  };
}

}  // namespace penstock::wire
