// SPDX-License-Identifier: Apache-2.0
#include "transport/nest.h"

#include <string>
#include <vector>

namespace penstock::transport {
namespace {

Error malformed(std::string what) {
  return {Errc::kMalformed, "the nest of a batch is malformed: " + std::move(what) +
                                "; sender and receiver must run the same version of penstock"};
}

}  // namespace

Result<NestToken> NestReader::next() {
  NestToken token{.tag = reader_.read<NestTag>(), .text = {}};
  switch (token.tag) {
    case NestTag::kNone:
    case NestTag::kFalse:
    case NestTag::kTrue: break;
    case NestTag::kInteger: token.integer = reader_.read<int64_t>(); break;
    case NestTag::kFloat: token.floating = reader_.read<double>(); break;
    case NestTag::kText:
    case NestTag::kBytes:
    case NestTag::kPickle: token.text = reader_.take_text(reader_.read<uint32_t>()); break;
    case NestTag::kList:
    case NestTag::kTuple:
    case NestTag::kDict: {
      token.count = reader_.read<uint32_t>();
      const size_t least = token.tag == NestTag::kDict ? 2 : 1;  // every value takes a byte at least
      if (reader_.ok() && token.count > reader_.remaining() / least) {
        return malformed("a container claims " + std::to_string(token.count) + " elements, more than bytes are left");
      }
      break;
    }
    case NestTag::kTensor: token.count = reader_.read<uint32_t>(); break;
    default: return malformed("unknown tag " + std::to_string(static_cast<int>(token.tag)));
  }
  if (!reader_.ok()) return malformed("it ends inside a value");
  return token;
}

Result<void> check_nest(std::span<const std::byte> bytes, uint32_t tensor_count, bool allow_pickle) {
  NestReader reader(bytes);
  std::vector<uint64_t> open{1};  // values still expected, innermost container last
  while (!open.empty()) {
    if (open.back() == 0) {
      open.pop_back();
      continue;
    }
    --open.back();
    auto token = reader.next();
    if (!token) return token.error();
    switch (token.value().tag) {
      case NestTag::kList:
      case NestTag::kTuple: open.push_back(token.value().count); break;
      case NestTag::kDict: open.push_back(uint64_t{token.value().count} * 2); break;
      case NestTag::kTensor:
        if (token.value().count >= tensor_count) return malformed("a tensor index is outside the table");
        break;
      case NestTag::kPickle:
        if (!allow_pickle) {
          return Error{Errc::kUnsupported,
                       "a batch holds a pickled object, and objects from this worker are not trusted; send tensors, "
                       "numbers, text and nests of them, or pass trust_workers=True"};
        }
        break;
      default: break;
    }
    if (open.size() > kNestDepthMax) {
      return Error{Errc::kTooLarge, "a batch is nested deeper than " + std::to_string(kNestDepthMax) + " levels"};
    }
  }
  if (!reader.at_end()) return malformed("bytes follow its last value");
  return {};
}

}  // namespace penstock::transport
