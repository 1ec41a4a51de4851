// SPDX-License-Identifier: Apache-2.0
#include "wire/nest.h"

#include <string>
#include <string_view>
#include <vector>

#include "wire/array_dtype.h"
#include "wire/malformed.h"

namespace penstock::wire {
namespace {

Fault malformed_nest(std::string_view reason) { return malformed("the nest of a batch", reason); }

std::string_view take_short_text(ByteReader& reader) { return reader.take_text(reader.read<uint8_t>()); }

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
      token.text = reader_.take_text(reader_.read<uint32_t>());
      token.count = reader_.read<uint32_t>();
      break;
    default: return malformed_nest("unknown tag " + std::to_string(static_cast<int>(token.tag)));
  }
  if (!reader_.ok()) return malformed_nest("it ends inside a value");
  if (auto checked = check(token); !checked) return checked.error();
  return token;
}

// The faults of a token that is all there.
Result<void> NestReader::check(const NestToken& token) const {
  switch (token.tag) {
    case NestTag::kList:
    case NestTag::kTuple:
    case NestTag::kNamedTuple:
    case NestTag::kDict: {
      const size_t least = token.tag == NestTag::kDict ? 2 : 1;  // every value takes a byte at least
      if (token.count > reader_.remaining() / least) {
        return malformed_nest("a container claims " + std::to_string(token.count) +
                              " elements, more than bytes are left");
      }
      if (token.text.size() > kNamedTupleNameBytesMax) return malformed_nest("the name of a named tuple is too long");
      return {};
    }
    case NestTag::kBigInteger:
      if (token.text.empty() || token.text.size() > kBigIntegerBytesMax) {
        return malformed_nest("an integer has " + std::to_string(token.text.size()) + " bytes");
      }
      return {};
    case NestTag::kArray:
      // Elements without bytes would make room for any number of them.
      if (!token.dtype.empty() && array_item_bytes(token.dtype).value_or(0) == 0) {
        return malformed_nest("an array's dtype is none that travels");
      }
      return {};
    case NestTag::kScalar: {
      const auto item_bytes = array_item_bytes(token.dtype);
      if (!item_bytes) return malformed_nest("a scalar's dtype is none that travels");
      if (token.text.size() != *item_bytes) {
        return malformed_nest("a scalar has " + std::to_string(token.text.size()) + " bytes where its dtype has " +
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
      case NestTag::kNamedTuple: open.push_back(token.value().count); break;
      case NestTag::kDict: open.push_back(uint64_t{token.value().count} * 2); break;
      case NestTag::kTensor:
      case NestTag::kArray:
        if (token.value().count >= tensor_count) return malformed_nest("a tensor index is outside the table");
        break;
      case NestTag::kPickle:
        if (!allow_pickle) {
          return Fault{Errc::kUnsupported,
                       "a batch holds a pickled object, and objects from this worker are not trusted; send tensors, "
                       "numpy arrays, numbers, text and nests of them, or pass trust_workers=True"};
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

}  // namespace penstock::wire
