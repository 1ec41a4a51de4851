// SPDX-License-Identifier: Apache-2.0
#include "wire/nest.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "wire/frame.h"

namespace penstock::wire {
namespace {

constexpr uint64_t kItemBytesMax = 0x7fffffff;  // numpy's limit

bool is_letter_or_digit(char character) {
  return (character >= 'a' && character <= 'z') || (character >= 'A' && character <= 'Z') ||
         (character >= '0' && character <= '9');
}

// "[ns]", "[25s]", or empty for a date that has no unit yet.
bool is_date_unit(std::string_view text) {
  if (text.empty()) return true;
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return false;
  return std::ranges::all_of(text.substr(1, text.size() - 2), is_letter_or_digit);
}

// Whether elements of a kind may have this size. numpy itself rejects number types that this machine does not support.
bool has_size(char kind, uint64_t bytes) {
  switch (kind) {
    case 'b': return bytes == 1;
    case 'i':
    case 'u': return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    case 'f': return bytes == 2 || bytes == 4 || bytes == 8 || bytes == 12 || bytes == 16;
    case 'c': return bytes == 8 || bytes == 16 || bytes == 24 || bytes == 32;
    case 'm':
    case 'M': return bytes == 8;
    default: return kind == 'S' || kind == 'U' || kind == 'V';
  }
}

}  // namespace

std::optional<uint64_t> array_item_bytes(std::string_view dtype) {
  if (dtype.size() < 3 || dtype.size() > kArrayDtypeBytesMax) return std::nullopt;
  const char order = dtype[0];
  const char kind = dtype[1];
  if (order != '<' && order != '>' && order != '|') return std::nullopt;
  uint64_t bytes = 0;
  const char* const end = dtype.data() + dtype.size();
  const auto [rest, error] = std::from_chars(dtype.data() + 2, end, bytes);
  if (error != std::errc() || bytes > kItemBytesMax) return std::nullopt;
  const bool is_date = kind == 'm' || kind == 'M';
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  if (!has_size(kind, bytes) || !(is_date ? is_date_unit(unit) : unit.empty())) return std::nullopt;
  if (kind == 'U') bytes *= 4;  // the size is in characters
  return bytes <= kItemBytesMax ? std::optional(bytes) : std::nullopt;
}

namespace {

Fault malformed_nest(std::string_view reason) { return malformed("the nest of a batch", reason); }

std::string_view take_short_text(ByteReader& reader) { return reader.take_text(reader.read<uint8_t>()); }

// As decoded by Python with "surrogatepass".
bool is_utf8(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  const auto* at = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = at + text.size();
  while (at < end) {
    uint64_t eight = kHighBits;
    if (end - at >= 8) std::memcpy(&eight, at, sizeof eight);
    if ((eight & kHighBits) == 0) {
      at += sizeof eight;
      continue;
    }
    const unsigned char first = *at;
    if (first < 0x80) {
      ++at;
      continue;
    }
    const ptrdiff_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || end - at < length) return false;
    for (ptrdiff_t place = 1; place < length; ++place)
      if ((at[place] & 0xc0) != 0x80) return false;
    // More bytes than the character needs, or a code point above the maximum.
    if ((first == 0xe0 && at[1] < 0xa0) || (first == 0xf0 && at[1] < 0x90) || (first == 0xf4 && at[1] > 0x8f))
      return false;
    at += length;
  }
  return true;
}

bool may_be_key(const NestToken& token) {
  switch (token.tag) {
    case NestTag::kList:
    case NestTag::kDict:
    case NestTag::kTensor:
    case NestTag::kArray:
    // Hashing it would call its class, and the sender chooses the class.
    case NestTag::kNamedTuple:
    case NestTag::kObject:
    case NestTag::kPickle: return false;
    case NestTag::kScalar: return token.dtype[1] != 'V';  // numpy makes a writable one
    default: return true;
  }
}

// If an array has a separate dtype, its elements are the last dimension of a tensor of bytes.
bool is_array_of(const TensorEntry& entry, std::string_view dtype) {
  if (dtype.empty()) return is_numpy_dtype(entry.dtype);
  return entry.dtype == kDTypeUInt8 && !entry.shape.empty() && entry.strides.back() == 1 &&
         static_cast<uint64_t>(entry.shape.back()) == array_item_bytes(dtype);
}

}  // namespace

Result<NestToken> NestReader::next() {
  NestToken token{.tag = reader_.read<NestTag>(), .text = {}, .dtype = {}};
  switch (token.tag) {
    case NestTag::kNone:
    case NestTag::kFalse:
    case NestTag::kTrue: break;
    case NestTag::kInteger: token.integer = reader_.read<int64_t>(); break;
    case NestTag::kFloat: token.floating = reader_.read<double>(); break;
    case NestTag::kText:
    case NestTag::kBytes:
    case NestTag::kBigInteger:
    case NestTag::kPickle: token.text = reader_.take_text(reader_.read<uint32_t>()); break;
    case NestTag::kList:
    case NestTag::kTuple:
    case NestTag::kDict:
    case NestTag::kTensor: token.count = reader_.read<uint32_t>(); break;
    case NestTag::kArray:
      token.count = reader_.read<uint32_t>();
      token.dtype = take_short_text(reader_);
      break;
    case NestTag::kScalar:
      token.dtype = take_short_text(reader_);
      token.text = reader_.take_text(reader_.read<uint32_t>());
      break;
    case NestTag::kNamedTuple:
    case NestTag::kObject:
      token.text = reader_.take_text(reader_.read<uint32_t>());
      token.count = reader_.read<uint32_t>();
      break;
    default: return malformed_nest("unknown tag " + std::to_string(static_cast<int>(token.tag)));
  }
  if (!reader_.ok()) return malformed_nest("it ends inside a value");
  if (auto checked = check(token); !checked) return checked.error();
  return token;
}

// The faults of a complete token.
Result<void> NestReader::check(const NestToken& token) const {
  switch (token.tag) {
    case NestTag::kList:
    case NestTag::kTuple:
    case NestTag::kNamedTuple:
    case NestTag::kObject:
    case NestTag::kDict: {
      const size_t least = token.tag == NestTag::kDict ? 2 : 1;  // every value takes at least one byte
      if (token.count > reader_.remaining() / least) {
        return malformed_nest("a container claims " + std::to_string(token.count) +
                              " elements, more than there are bytes left");
      }
      if (token.text.size() > kClassNameBytesMax) return malformed_nest("the name of a class is too long");
      if (token.tag == NestTag::kObject && token.count == 0) return malformed_nest("an object has no context");
      return {};
    }
    case NestTag::kBigInteger:
      if (token.text.empty() || token.text.size() > kBigIntegerBytesMax) {
        return malformed_nest("an integer has " + std::to_string(token.text.size()) + " bytes");
      }
      return {};
    case NestTag::kArray:
      // Elements without bytes would allow any number of them.
      if (!token.dtype.empty() && array_item_bytes(token.dtype).value_or(0) == 0) {
        return malformed_nest("an array has an unsupported dtype");
      }
      return {};
    case NestTag::kScalar: {
      const auto item_bytes = array_item_bytes(token.dtype);
      if (!item_bytes) return malformed_nest("a scalar has an unsupported dtype");
      if (token.text.size() != *item_bytes) {
        return malformed_nest("a scalar has " + std::to_string(token.text.size()) + " bytes, but its dtype has " +
                              std::to_string(*item_bytes));
      }
      return {};
    }
    default: return {};
  }
}

uint64_t value_bytes(const NestToken& token) {
  switch (token.tag) {
    case NestTag::kNone:
    case NestTag::kFalse:
    case NestTag::kTrue: return kPlaceBytes;
    case NestTag::kArray: return kPlaceBytes + kArrayObjectBytes;
    default: return kPlaceBytes + kObjectBytes + kCharacterBytes * token.text.size();
  }
}

Result<uint64_t> check_nest(std::span<const std::byte> bytes, uint32_t tensor_count, bool allow_pickle) {
  NestReader reader(bytes);
  uint64_t bytes_of_values = 0;
  std::vector<uint64_t> open{1};  // values still expected, innermost container last
  while (!open.empty()) {
    if (open.back() == 0) {
      open.pop_back();
      continue;
    }
    --open.back();
    auto token = reader.next();
    if (!token) return token.error();
    bytes_of_values += value_bytes(token.value());
    switch (token.value().tag) {
      case NestTag::kList:
      case NestTag::kTuple:
      case NestTag::kNamedTuple:
      case NestTag::kObject: open.push_back(token.value().count); break;
      case NestTag::kDict: open.push_back(uint64_t{token.value().count} * 2); break;
      case NestTag::kTensor:
      case NestTag::kArray:
        if (token.value().count >= tensor_count) return malformed_nest("a tensor index is outside the table");
        break;
      case NestTag::kPickle:
        if (!allow_pickle) {
          return Fault{Errc::kUnsupported,
                       "a batch contains a pickled object, but objects from this worker are not trusted; send tensors, "
                       "numpy arrays, numbers, text and nested containers of them, or pass trust_workers=True"};
        }
        break;
      default: break;
    }
    if (open.size() > kNestDepthMax) {
      return Fault{Errc::kTooLarge, "a batch is nested deeper than " + std::to_string(kNestDepthMax) + " levels"};
    }
  }
  if (!reader.at_end()) return malformed_nest("bytes follow its last value");
  return bytes_of_values;
}

Result<void> check_python_values(std::span<const std::byte> bytes, std::span<const TensorEntry> leaves) {
  struct Open {
    uint64_t left = 1;  // values still expected
    bool is_dict = false;
    bool is_key = false;  // inside a key
  };
  NestReader reader(bytes);
  std::vector<Open> open(1);  // innermost last
  while (!open.empty()) {
    Open& innermost = open.back();
    if (innermost.left == 0) {
      open.pop_back();
      continue;
    }
    const bool is_key = innermost.is_key || (innermost.is_dict && innermost.left % 2 == 0);
    --innermost.left;
    const NestToken token = reader.next().value();  // already checked
    if (is_key && !may_be_key(token)) return malformed_nest("a dictionary key is not hashable");
    switch (token.tag) {
      case NestTag::kText:
        if (!is_utf8(token.text)) return malformed_nest("a text is not UTF-8");
        break;
      case NestTag::kArray:
        if (!is_array_of(leaves[token.count], token.dtype))
          return malformed_nest("the tensor of an array does not consist of elements of its dtype");
        break;
      case NestTag::kList:
      case NestTag::kTuple:
      case NestTag::kNamedTuple:
      case NestTag::kObject: open.push_back({.left = token.count, .is_key = is_key}); break;
      case NestTag::kDict: open.push_back({.left = uint64_t{token.count} * 2, .is_dict = true}); break;
      default: break;
    }
  }
  return {};
}

namespace {

// A container that is being read.
struct OpenContainer {
  uint64_t count = 1;  // values in it
  uint64_t left = 1;   // values still expected
  NestTag tag = NestTag::kList;
  bool is_key = false;     // a key of a dict, or inside one
  std::string name = {};   // of the container itself; empty if it has no part in the names of its leaves
  std::string value = {};  // name of the next value, in a dict

  bool is_object() const { return tag == NestTag::kObject; }
  bool expects_key() const { return tag == NestTag::kDict && left % 2 == 0; }
};

std::string name_of_key(const NestToken& token) {
  switch (token.tag) {
    case NestTag::kText: return std::string(token.text);
    case NestTag::kInteger: return std::to_string(token.integer);
    case NestTag::kFalse: return "False";
    case NestTag::kTrue: return "True";
    default: return "?";
  }
}

// The name of a value that is not a key, whose container has not counted it yet.
std::string name_in(const OpenContainer& parent, const NestToken& token) {
  if (parent.tag == NestTag::kDict) return parent.value;
  const uint64_t position = parent.count - parent.left;
  if (!parent.is_object()) return std::to_string(position);
  if (position == 0) return "context";
  return token.tag == NestTag::kDict ? "" : std::to_string(position - 1);
}

// Calls `visit` with the token of each tensor and array, and with the open containers, the batch's own place first.
// Returns false for a nest that cannot be read token by token.
template <typename Visit>
bool visit_leaves(std::span<const std::byte> bytes, const Visit& visit) {
  NestReader reader(bytes);
  std::vector<OpenContainer> open(1);
  while (!open.empty()) {
    OpenContainer& parent = open.back();
    if (parent.left == 0) {
      open.pop_back();
      continue;
    }
    const auto read = reader.next();
    if (!read || read.value().tag == NestTag::kPickle) return false;
    const NestToken& token = read.value();
    const bool is_key = parent.is_key || parent.expects_key();
    if (is_key && !parent.is_key) parent.value = name_of_key(token);
    OpenContainer inner{.count = token.count, .left = token.count, .tag = token.tag, .is_key = is_key};
    switch (token.tag) {
      case NestTag::kTensor:
      case NestTag::kArray: visit(token, open); break;
      case NestTag::kDict: inner.count = inner.left = uint64_t{token.count} * 2; [[fallthrough]];
      case NestTag::kList:
      case NestTag::kTuple:
      case NestTag::kNamedTuple:
      case NestTag::kObject:
        if (!is_key && open.size() > 1) inner.name = name_in(parent, token);
        --parent.left;
        open.push_back(std::move(inner));
        continue;
      default: break;
    }
    --parent.left;
  }
  return true;
}

bool is_fixed(const NestToken& token, const std::vector<OpenContainer>& open) {
  return token.tag == NestTag::kArray || open.back().is_object();
}

}  // namespace

std::optional<std::set<uint32_t>> fixed_leaves(std::span<const std::byte> bytes) {
  std::set<uint32_t> fixed;
  const auto visit = [&](const NestToken& token, const std::vector<OpenContainer>& open) {
    if (is_fixed(token, open)) fixed.insert(token.count);
  };
  if (!visit_leaves(bytes, visit)) return std::nullopt;
  return fixed;
}

std::optional<std::vector<NamedLeaf>> named_leaves(std::span<const std::byte> bytes) {
  std::vector<NamedLeaf> leaves;
  const auto visit = [&](const NestToken& token, const std::vector<OpenContainer>& open) {
    NamedLeaf leaf{.name = {}, .index = token.count, .is_fixed = is_fixed(token, open)};
    for (const OpenContainer& container : open)
      if (!container.name.empty()) leaf.name += container.name + ".";
    if (open.size() > 1) leaf.name += name_in(open.back(), token);
    leaves.push_back(std::move(leaf));
  };
  if (!visit_leaves(bytes, visit)) return std::nullopt;
  return leaves;
}

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
