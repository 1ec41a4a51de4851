// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace penstock::wire {
namespace {

struct FrameHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint32_t tensor_count;
  uint32_t boundary_count;
  uint64_t payload_bytes;
  uint32_t nest_bytes;
  uint32_t table_bytes;
};
static_assert(sizeof(FrameHeader) == 32);

struct EntryHeader {
  uint8_t dtype;
  uint8_t dim_count;
  uint8_t encoding;
  uint8_t reserved0;
  uint32_t file_index;
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(EntryHeader) == 24);

Fault malformed_frame(std::string_view reason) { return malformed("a batch record", reason); }

template <typename T>
T read_struct(ByteReader& reader) {
  T value{};
  if (auto bytes = reader.take(sizeof(T)); reader.ok()) std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

template <typename T>
void write_struct(ByteWriter& writer, const T& value) {
  writer.write_bytes(std::as_bytes(std::span(&value, 1)));
}

Result<TensorEntry> read_entry(ByteReader& reader, uint64_t payload_bytes) {
  const auto head = read_struct<EntryHeader>(reader);
  if (!reader.ok()) return malformed_frame("the tensor table ends early");
  if (head.reserved0 != 0) return malformed_frame("reserved bytes of a tensor entry are not zero");
  if (head.dim_count > kDimCountMax) {
    return Fault{Errc::kTooLarge, "a tensor entry has " + std::to_string(head.dim_count) + " dimensions; at most " +
                                      std::to_string(kDimCountMax) + " are allowed"};
  }
  if (head.encoding > static_cast<uint8_t>(Encoding::kShared)) return malformed_frame("unknown encoding of a tensor");
  TensorEntry entry{.dtype = head.dtype,
                    .encoding = static_cast<Encoding>(head.encoding),
                    .offset = head.offset,
                    .bytes = head.bytes,
                    .shape = {},
                    .strides = {},
                    .file_index = head.file_index};
  if (entry.file_index != 0 && entry.encoding != Encoding::kShared)
    return malformed_frame("a tensor that is not shared names a file");
  if (reader.remaining() < size_t{head.dim_count} * 16) return malformed_frame("the tensor table ends early");
  entry.shape.resize(head.dim_count);
  entry.strides.resize(head.dim_count);
  for (auto& size : entry.shape) size = reader.read<int64_t>();
  for (auto& stride : entry.strides) stride = reader.read<int64_t>();
  const auto bytes = span_bytes(entry.dtype, entry.shape, entry.strides);
  if (!bytes) return bytes.error();
  if (entry.encoding == Encoding::kWithheld) {
    if (entry.bytes != 0 || entry.offset != 0) return malformed_frame("a lazy tensor has bytes");
    return entry;
  }
  if (is_narrow(entry.encoding)) {
    if (bytes.value() / kWidenFactorMax > entry.bytes)
      return Fault{Errc::kTooLarge, "a tensor of " + std::to_string(bytes.value()) + " bytes is compressed to " +
                                        std::to_string(entry.bytes) + "; at most " + std::to_string(kWidenFactorMax) +
                                        " times as many are accepted"};
  } else if (bytes.value() != entry.bytes) {
    return malformed_frame("a tensor entry claims " + std::to_string(entry.bytes) + " bytes where its shape needs " +
                           std::to_string(bytes.value()));
  }
  if (entry.encoding == Encoding::kShared) {
    if (entry.offset % dtype_bytes(entry.dtype) != 0)
      return malformed_frame("a shared tensor's offset is not a multiple of its element size");
    if (entry.offset > kPayloadBytesMax || entry.bytes > kPayloadBytesMax - entry.offset)
      return Fault{Errc::kTooLarge, "a shared tensor ends beyond " + std::to_string(kPayloadBytesMax) + " bytes"};
    return entry;
  }
  if (entry.offset % kPayloadAlignment != 0) return malformed_frame("a tensor's offset is not a multiple of 64");
  if (entry.offset > payload_bytes || entry.bytes > payload_bytes - entry.offset) {
    return malformed_frame("a tensor lies outside the payload");
  }
  return entry;
}

}  // namespace

Result<uint64_t> span_bytes(DTypeCode dtype, std::span<const int64_t> shape, std::span<const int64_t> strides) {
  const uint64_t item_bytes = dtype_bytes(dtype);
  if (item_bytes == 0) return malformed_frame("unknown dtype code " + std::to_string(dtype));
  if (shape.size() != strides.size()) return malformed_frame("shape and strides differ in length");
  uint64_t last = 0;  // the index of the last element
  int64_t element_count = 1;
  bool is_empty = false;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] < 0 || strides[dim] < 0) return malformed_frame("a size or a stride is negative");
    if (shape[dim] == 0) is_empty = true;
    // Strides of zero allow any number of elements; torch throws if the number does not fit 64 bits.
    if (__builtin_mul_overflow(element_count, shape[dim], &element_count)) {
      return malformed_frame("a tensor's number of elements overflows");
    }
  }
  if (is_empty) return uint64_t{0};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    uint64_t extent = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(shape[dim] - 1), static_cast<uint64_t>(strides[dim]), &extent) ||
        __builtin_add_overflow(last, extent, &last)) {
      return malformed_frame("a tensor's extent overflows");
    }
  }
  if (last >= kPayloadBytesMax / item_bytes) {
    return Fault{Errc::kTooLarge, "a tensor of " + std::to_string(last) + " elements is above the cap of " +
                                      std::to_string(kPayloadBytesMax) + " bytes"};
  }
  return (last + 1) * item_bytes;
}

uint64_t plain_bytes(const TensorEntry& entry) {
  const auto bytes = span_bytes(entry.dtype, entry.shape, entry.strides);
  PENSTOCK_ASSERT(bytes, "an entry was not checked");
  return bytes.value();
}

uint64_t element_bytes(const TensorEntry& entry) {
  uint64_t bytes = dtype_bytes(entry.dtype);
  for (const int64_t size : entry.shape)
    if (size == 0) return 0;
  for (const int64_t size : entry.shape)
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) return ~uint64_t{0};
  return bytes;
}

uint64_t whole_bytes(const Frame& frame) {
  // 2^16 tensors of at most 2^40 bytes, so the sum cannot overflow.
  uint64_t bytes = frame.tensors.size() * kTensorObjectBytes;
  for (const TensorEntry& entry : frame.tensors)
    if (entry.encoding != Encoding::kWithheld) bytes += plain_bytes(entry);
  return bytes;
}

uint32_t Frame::shared_file_count() const {
  uint32_t count = 0;
  for (const TensorEntry& entry : tensors) {
    if (entry.encoding == Encoding::kShared) count = std::max(count, entry.file_index + 1);
  }
  return count;
}

std::vector<std::byte> write_frame(const Frame& frame) {
  PENSTOCK_ASSERT(frame.tensors.size() <= kTensorCountMax, "tensors in one batch: ", frame.tensors.size());
  PENSTOCK_ASSERT(frame.nest.size() <= kNestBytesMax, "nest bytes: ", frame.nest.size());
  PENSTOCK_ASSERT(frame.boundary_keys.size() <= frame.tensors.size());
  uint64_t table_bytes = 0;
  for (const auto& entry : frame.tensors) table_bytes += sizeof(EntryHeader) + entry.shape.size() * 16;
  ByteWriter writer;
  write_struct(writer, FrameHeader{.magic = kFrameMagic,
                                   .version = kFrameVersion,
                                   .reserved = 0,
                                   .tensor_count = static_cast<uint32_t>(frame.tensors.size()),
                                   .boundary_count = static_cast<uint32_t>(frame.boundary_keys.size()),
                                   .payload_bytes = frame.payload_bytes,
                                   .nest_bytes = static_cast<uint32_t>(frame.nest.size()),
                                   .table_bytes = static_cast<uint32_t>(table_bytes)});
  for (const auto& entry : frame.tensors) {
    write_struct(writer, EntryHeader{.dtype = entry.dtype,
                                     .dim_count = static_cast<uint8_t>(entry.shape.size()),
                                     .encoding = static_cast<uint8_t>(entry.encoding),
                                     .reserved0 = 0,
                                     .file_index = entry.file_index,
                                     .offset = entry.offset,
                                     .bytes = entry.bytes});
    for (int64_t size : entry.shape) writer.write(size);
    for (int64_t stride : entry.strides) writer.write(stride);
  }
  for (std::string_view key : frame.boundary_keys) {
    PENSTOCK_ASSERT(key.size() == kBoundaryKeyBytes, "a boundary key of ", key.size(), " characters");
    writer.write_text(key);
  }
  writer.write_bytes(frame.nest);
  return writer.take();
}

Result<Frame> parse_frame(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const auto head = read_struct<FrameHeader>(reader);
  if (!reader.ok()) return malformed_frame("it is shorter than its header");
  if (head.magic != kFrameMagic) return malformed_frame("it does not start with PNF1");
  if (head.version != kFrameVersion) return malformed_frame("its version is " + std::to_string(head.version));
  if (head.reserved != 0) return malformed_frame("reserved bytes of the header are not zero");
  if (head.tensor_count > kTensorCountMax || head.nest_bytes > kNestBytesMax || head.payload_bytes > kPayloadBytesMax) {
    return Fault{Errc::kTooLarge, "a batch record claims " + std::to_string(head.tensor_count) + " tensors, " +
                                      std::to_string(head.nest_bytes) + " nest bytes and " +
                                      std::to_string(head.payload_bytes) + " payload bytes, above the caps"};
  }
  if (head.boundary_count > head.tensor_count) return malformed_frame("more boundary keys than tensors");
  const uint64_t rest =
      uint64_t{head.table_bytes} + uint64_t{head.boundary_count} * kBoundaryKeyBytes + head.nest_bytes;
  if (reader.remaining() != rest) return malformed_frame("its length does not match its header");
  if (head.table_bytes < uint64_t{head.tensor_count} * sizeof(EntryHeader)) {
    return malformed_frame("its tensor table is too short");
  }
  Frame frame;
  frame.payload_bytes = head.payload_bytes;
  frame.tensors.reserve(head.tensor_count);
  uint32_t file_count = 0;
  const size_t table_end = reader.position() + head.table_bytes;
  for (uint32_t index = 0; index < head.tensor_count; ++index) {
    auto entry = read_entry(reader, head.payload_bytes);
    if (!entry) return entry.error();
    const bool is_boundary = index >= head.tensor_count - head.boundary_count;
    if (entry.value().encoding == Encoding::kWithheld && is_boundary)
      return malformed_frame("a boundary tensor is lazy");
    if (entry.value().encoding == Encoding::kShared) {
      if (is_boundary) return malformed_frame("a boundary tensor is shared");
      // Files are numbered by first use in the table, so that each passed file contains a tensor.
      if (entry.value().file_index > file_count) return malformed_frame("a file in shared memory is missing");
      file_count = std::max(file_count, entry.value().file_index + 1);
      if (file_count > kSharedFileCountMax)
        return Fault{Errc::kTooLarge, "a batch record refers to more than " + std::to_string(kSharedFileCountMax) +
                                          " files in shared memory"};
    }
    frame.tensors.push_back(std::move(entry).value());
  }
  if (reader.position() != table_end) return malformed_frame("its tensor table length does not match its header");
  frame.boundary_keys.reserve(head.boundary_count);
  for (uint32_t index = 0; index < head.boundary_count; ++index) {
    frame.boundary_keys.push_back(reader.take_text(kBoundaryKeyBytes));
  }
  frame.nest = reader.take(head.nest_bytes);
  PENSTOCK_ASSERT(reader.ok() && reader.remaining() == 0);
  return frame;
}

}  // namespace penstock::wire
