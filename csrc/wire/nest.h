// SPDX-License-Identifier: Apache-2.0
#pragma once
// The nest: the shape of a batch without its tensors, as dicts, lists and tuples around text, numbers, None and
// references to the tensor table, in a stream of tokens in depth-first order. Any other object is sent as one pickle,
// which only a local worker may send; a reader that does not trust its peer refuses kPickle. The tokens above kPickle
// are for batches of such peers: objects that a local worker would pickle, but that a reader can create without
// executing instructions.
//
// A packed record puts a batch record, its nest included, and the payload into one buffer.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

enum class NestTag : uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInteger = 3,  // 64-bit signed
  kFloat = 4,    // 64-bit
  kText = 5,     // UTF-8, possibly with surrogates
  kBytes = 6,
  kList = 7,         // followed by `count` values
  kTuple = 8,        // followed by `count` values
  kDict = 9,         // followed by `count` pairs of key and value
  kTensor = 10,      // an index into the tensor table
  kPickle = 11,      // pickle protocol 5 whose persistent ids are indices into the tensor table
  kBigInteger = 12,  // an integer of any size: two's complement, least significant byte first
  kArray = 13,       // an index into the tensor table, and a numpy dtype if the array's differs from the tensor's
  kScalar = 14,      // a numpy scalar: a dtype, and the bytes of one element of it
  kNamedTuple = 15,  // "module:qualified name" of its class, followed by `count` values
  kObject = 16,      // the same, of a class that both sides have registered: its context, then its children
};

constexpr uint32_t kNestDepthMax = 64;
constexpr uint32_t kBigIntegerBytesMax = 4096;
constexpr uint32_t kClassNameBytesMax = 1024;

// Thread-compatible.
class NestWriter {
 public:
  void none() { tag(NestTag::kNone); }
  void boolean(bool value) { tag(value ? NestTag::kTrue : NestTag::kFalse); }
  void integer(int64_t value) { tag(NestTag::kInteger), writer_.write(value); }
  void floating(double value) { tag(NestTag::kFloat), writer_.write(value); }
  void text(std::string_view value) { sized(NestTag::kText, value); }
  void bytes(std::string_view value) { sized(NestTag::kBytes, value); }
  void pickle(std::string_view value) { sized(NestTag::kPickle, value); }
  void list(uint32_t count) { tag(NestTag::kList), writer_.write(count); }
  void tuple(uint32_t count) { tag(NestTag::kTuple), writer_.write(count); }
  void dict(uint32_t count) { tag(NestTag::kDict), writer_.write(count); }
  void tensor(uint32_t index) { tag(NestTag::kTensor), writer_.write(index); }
  void big_integer(std::string_view value) { sized(NestTag::kBigInteger, value); }
  // With a dtype, the tensor is of bytes, and its last dimension is one element of the array.
  void array(uint32_t index, std::string_view dtype) { tag(NestTag::kArray), writer_.write(index), short_text(dtype); }
  void scalar(std::string_view dtype, std::string_view element) {
    tag(NestTag::kScalar), short_text(dtype);
    writer_.write(static_cast<uint32_t>(element.size()));
    writer_.write_text(element);
  }
  void named_tuple(std::string_view name, uint32_t count) {
    sized(NestTag::kNamedTuple, name);
    writer_.write(count);
  }
  void object(std::string_view name, uint32_t count) {
    sized(NestTag::kObject, name);
    writer_.write(count);
  }

  std::span<const std::byte> view() const { return writer_.bytes(); }
  void clear() { writer_ = {}; }

 private:
  void tag(NestTag value) { writer_.write(value); }
  void sized(NestTag kind, std::string_view value) {
    tag(kind);
    writer_.write(static_cast<uint32_t>(value.size()));
    writer_.write_text(value);
  }
  void short_text(std::string_view value) {
    writer_.write(static_cast<uint8_t>(value.size()));
    writer_.write_text(value);
  }

  ByteWriter writer_;
};

// One token. Only the members named by the tag are meaningful; the views point into the input.
struct NestToken {
  NestTag tag;
  uint32_t count = 0;  // elements, pairs, or the tensor's index
  int64_t integer = 0;
  double floating = 0;
  std::string_view text;   // or bytes, a pickle, a big integer, a scalar's element, the name of a class
  std::string_view dtype;  // of a scalar, and of an array whose dtype differs from its tensor's
};

// The assumed size of a nest value in its reader's memory, at least the size in Python or C++. Each is at most
// kWholeFactorMax times the bytes of the token, so that no nest is too large by itself.
constexpr uint64_t kPlaceBytes = 64;         // the value's place in its container
constexpr uint64_t kObjectBytes = 64;        // a separate object, which None, False and True do not have
constexpr uint64_t kArrayObjectBytes = 320;  // the same, for a numpy array
constexpr uint64_t kCharacterBytes = 4;      // per byte of a text, bytes or a number: one character may widen all

uint64_t value_bytes(const NestToken& token);

// Reads token by token. Counts are checked against the remaining bytes, so that a reader may reserve memory for them; a
// dtype is one that array_item_bytes() supports, and a scalar has the bytes of one element. Thread-compatible.
class NestReader {
 public:
  explicit NestReader(std::span<const std::byte> bytes) : reader_(bytes) {}

  Result<NestToken> next();
  bool at_end() const { return reader_.remaining() == 0; }

 private:
  Result<void> check(const NestToken& token) const;

  ByteReader reader_;
};

// Checks a whole nest: the grammar, the depth, that every tensor index is below `tensor_count`, and that no bytes
// follow. `allow_pickle`: whether the peer is one of our child processes. Returns the sum of its values' value_bytes().
Result<uint64_t> check_nest(std::span<const std::byte> bytes, uint32_t tensor_count, bool allow_pickle);

// Checks that Python can create the values of a nest that check_nest() has accepted with this number of `leaves`: texts
// are UTF-8, dictionary keys are hashable, and arrays match their tensors. Named tuples, objects and dates can be
// checked only by Python.
Result<void> check_python_values(std::span<const std::byte> bytes, std::span<const TensorEntry> leaves);

// The leaves of a nest that no stand-in tensor can replace: numpy arrays, and direct children of an object, since its
// class makes the object from their values. Empty for a nest that cannot be read token by token.
std::optional<std::set<uint32_t>> fixed_leaves(std::span<const std::byte> bytes);

// A tensor of a nest, and the keys and positions that lead to it, joined by dots: "image.pixels", "0". A position is
// also the name of a named tuple's field, and of an object's child; a dict that is an object's child has no part in the
// name, so that the fields of a dataclass have their own names. A key that is neither text, a 64-bit integer nor a bool
// is named "?". Empty for a batch that is one tensor.
struct NamedLeaf {
  std::string name;
  uint32_t index = 0;     // in the tensor table
  bool is_fixed = false;  // as for fixed_leaves()

  friend bool operator==(const NamedLeaf&, const NamedLeaf&) = default;
};

// The leaves in the order of the nest; a tensor that occurs twice is listed twice. Empty as for fixed_leaves().
std::optional<std::vector<NamedLeaf>> named_leaves(std::span<const std::byte> bytes);

constexpr uint32_t kArrayDtypeBytesMax = 64;

// Bytes of one element of a numpy array that has no tensor dtype: text, bytes, dates, other byte orders. The dtype is
// written in the form of numpy's `dtype.str`: byte order, kind and element size. Empty if the text is not a dtype of
// plain numbers, text, bytes or dates. Objects, structures and compound dtypes are never included: their elements are,
// or may be, addresses.
std::optional<uint64_t> array_item_bytes(std::string_view dtype);

// Whether numpy supports the dtype of a tensor.
constexpr bool is_numpy_dtype(DTypeCode code) {
  // Not the 16-bit complex (8) and bfloat16 (15), nor the 8-bit floats (23 to 26).
  return code <= 7 || (code >= 9 && code <= 11) || (code >= 27 && code <= 29);
}

// A batch record and its payload in one contiguous buffer, for values that are sent as a whole: the body of a prefix
// request, or a separate value. PROTOCOL.md has the bytes. The views point into the bytes that were read.
struct PackedRecord {
  Frame frame;
  std::span<const std::byte> record;
  std::span<const std::byte> payload;

  std::span<const std::byte> bytes_of(const TensorEntry& entry) const {
    return payload.subspan(entry.offset, entry.bytes);
  }
};

// Lays out the tensors of `frame` one after the other and copies in their bytes from `sources`, in the same order.
std::vector<std::byte> write_packed_record(Frame frame, std::span<const std::span<const std::byte>> sources);

// The tensors of a packed record do not share bytes, so that copies of them take no more memory than the record.
Result<PackedRecord> parse_packed_record(std::span<const std::byte> bytes);

}  // namespace penstock::wire
