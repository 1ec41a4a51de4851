// SPDX-License-Identifier: Apache-2.0
// The batch record and the nest in it, as a trainer reads them of a worker.
#include <algorithm>
#include <string_view>

#include "fuzz_target.h"
#include "record_repair.h"
#include "record_samples.h"
#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

// Where the last element of a tensor ends, computed in numbers that cannot overflow.
__int128 extent_bytes(const wire::TensorEntry& entry) {
  __int128 last = 0;
  for (size_t dim = 0; dim < entry.shape.size(); ++dim) {
    if (entry.shape[dim] == 0) return 0;
    last += static_cast<__int128>(entry.shape[dim] - 1) * entry.strides[dim];
  }
  return (last + 1) * dtype_bytes(entry.dtype);
}

// Character by character, each written again.
bool is_utf8(std::string_view text) {
  for (size_t place = 0; place < text.size();) {
    const auto first = static_cast<unsigned char>(text[place]);
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if ((first >= 0x80 && first < 0xc0) || first > 0xf7 || place + length > text.size()) return false;
    uint32_t code = length == 1 ? first : first & (0x7f >> length);
    for (size_t next = 1; next < length; ++next) {
      const auto byte = static_cast<unsigned char>(text[place + next]);
      if (byte >> 6 != 2) return false;
      code = code << 6 | (byte & 0x3f);
    }
    const size_t needed = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    if (length != needed || code > 0x10ffff) return false;
    place += length;
  }
  return true;
}

// What a walk has found.
struct Findings {
  bool has_pickle = false;
  bool is_pythons = true;  // Python can make the values, as far as PROTOCOL.md says
};

bool is_array(const wire::TensorEntry& entry, std::string_view dtype) {
  if (dtype.empty()) return entry.dtype != 8 && entry.dtype != 15 && (entry.dtype < 23 || entry.dtype > 26);
  return entry.dtype == wire::kDTypeUInt8 && !entry.shape.empty() && entry.strides.back() == 1 &&
         wire::array_item_bytes(dtype) == static_cast<uint64_t>(entry.shape.back());
}

// Reads one value as Python's bindings do, by recursion, and writes it again.
void copy_value(wire::NestReader& reader, wire::NestWriter& writer, std::span<const wire::TensorEntry> leaves,
                size_t depth, bool is_key, Findings& findings) {
  expect(depth <= wire::kNestDepthMax, "a checked nest is not deeper than its cap");
  const auto token = reader.next();
  expect(static_cast<bool>(token), "a checked nest can be walked");
  const wire::NestToken& value = token.value();
  touch(std::as_bytes(std::span(value.text)));
  size_t count = value.count;
  switch (value.tag) {
    case wire::NestTag::kNone: writer.none(); return;
    case wire::NestTag::kFalse: writer.boolean(false); return;
    case wire::NestTag::kTrue: writer.boolean(true); return;
    case wire::NestTag::kInteger: writer.integer(value.integer); return;
    case wire::NestTag::kFloat: writer.floating(value.floating); return;
    case wire::NestTag::kText:
      if (!is_utf8(value.text)) findings.is_pythons = false;
      writer.text(value.text);
      return;
    case wire::NestTag::kBytes: writer.bytes(value.text); return;
    case wire::NestTag::kPickle:
      findings.has_pickle = true;
      if (is_key) findings.is_pythons = false;
      writer.pickle(value.text);
      return;
    case wire::NestTag::kBigInteger: writer.big_integer(value.text); return;
    case wire::NestTag::kTensor:
      touch(std::as_bytes(std::span(leaves.data() + value.count, 1)));
      if (is_key) findings.is_pythons = false;
      writer.tensor(value.count);
      return;
    case wire::NestTag::kArray:
      touch(std::as_bytes(std::span(leaves.data() + value.count, 1)));
      expect(value.dtype.empty() || wire::array_item_bytes(value.dtype).value_or(0) > 0,
             "an array's elements have bytes");
      if (is_key || !is_array(leaves[value.count], value.dtype)) findings.is_pythons = false;
      writer.array(value.count, value.dtype);
      return;
    case wire::NestTag::kScalar:
      expect(wire::array_item_bytes(value.dtype) == value.text.size(), "a scalar has the bytes of one element");
      if (is_key && value.dtype[1] == 'V') findings.is_pythons = false;
      writer.scalar(value.dtype, value.text);
      return;
    case wire::NestTag::kList: writer.list(value.count); break;
    case wire::NestTag::kTuple: writer.tuple(value.count); break;
    case wire::NestTag::kDict: writer.dict(value.count), count *= 2; break;
    case wire::NestTag::kNamedTuple: writer.named_tuple(value.text, value.count); break;
    case wire::NestTag::kObject: writer.object(value.text, value.count); break;
  }
  const bool is_dict = value.tag == wire::NestTag::kDict;
  if (is_key && value.tag != wire::NestTag::kTuple) findings.is_pythons = false;
  for (size_t place = 0; place < count; ++place)
    copy_value(reader, writer, leaves, depth + 1, is_key || (is_dict && place % 2 == 0), findings);
}

bool check_the_nest(const wire::Frame& frame) {
  const auto leaf_count = static_cast<uint32_t>(frame.leaf_count());
  const auto checked = wire::check_nest(frame.nest, leaf_count, /*allow_pickle=*/true);
  if (!checked) {
    expect(!wire::check_nest(frame.nest, leaf_count, /*allow_pickle=*/false), "what is trusted less may hold less");
    return false;
  }
  expect(checked.value() <= wire::kWholeFactorMax * frame.nest.size(), "no nest is too large by itself");
  // The leaves alone, in memory of exactly their size.
  const std::vector<wire::TensorEntry> leaves(frame.tensors.begin(), frame.tensors.begin() + leaf_count);
  wire::NestReader reader(frame.nest);
  wire::NestWriter writer;
  Findings findings;
  copy_value(reader, writer, leaves, 1, false, findings);
  expect(reader.at_end(), "a checked nest is one value");
  expect(std::ranges::equal(writer.view(), frame.nest), "a nest that is written again is the same bytes");
  expect(static_cast<bool>(wire::check_nest(frame.nest, leaf_count, /*allow_pickle=*/false)) == !findings.has_pickle,
         "a nest without pickles, and no other, is for those who are not trusted");
  expect(static_cast<bool>(wire::check_python_values(frame.nest, leaves)) == findings.is_pythons,
         "values that Python can make, and no others, are for Python");
  return true;
}

}  // namespace

std::vector<Bytes> make_seeds() { return wire::sample_records(); }

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (choices.mostly()) bytes = repair_record(bytes, &repair_nest, choices);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_frame(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::Frame& frame = parsed.value();
  expect(frame.tensors.size() <= wire::kTensorCountMax && frame.payload_bytes <= wire::kPayloadBytesMax, "caps hold");
  expect(frame.boundary_keys.size() <= frame.tensors.size(), "no more keys than tensors");
  const Bytes payload(frame.payload_bytes);
  __int128 whole_bytes = static_cast<__int128>(frame.tensors.size()) * wire::kTensorObjectBytes;
  for (const wire::TensorEntry& entry : frame.tensors) {
    expect(entry.shape.size() <= wire::kDimCountMax && entry.strides.size() == entry.shape.size(),
           "dimensions are capped");
    if (entry.encoding != wire::Encoding::kWithheld) whole_bytes += extent_bytes(entry);
    switch (entry.encoding) {
      case wire::Encoding::kPlain:
        expect(extent_bytes(entry) == entry.bytes, "a tensor's bytes are what its shape and strides span");
        break;
      case wire::Encoding::kWithheld:
        expect(entry.bytes == 0 && entry.offset == 0, "what is withheld has no bytes");
        break;
      case wire::Encoding::kShared:
        expect(extent_bytes(entry) == entry.bytes, "a tensor's bytes are what its shape and strides span");
        expect(entry.file_index < frame.shared_file_count(), "a shared tensor's file is counted");
        expect(entry.offset + entry.bytes <= wire::kPayloadBytesMax, "a shared tensor ends within the cap");
        continue;
      default:
        expect(extent_bytes(entry) / wire::kWidenFactorMax <= entry.bytes, "few bytes do not become many");
        break;
    }
    touch({payload.data() + entry.offset, entry.bytes});
  }
  expect(wire::whole_bytes(frame) == whole_bytes, "every tensor is counted with all of its bytes");
  for (const std::string_view key : frame.boundary_keys) touch(std::as_bytes(std::span(key)));
  expect(std::ranges::equal(wire::write_frame(frame), bytes), "a record that is written again is the same bytes");
  return check_the_nest(frame);
}

}  // namespace penstock::fuzz
