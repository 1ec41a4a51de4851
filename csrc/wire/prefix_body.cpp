// SPDX-License-Identifier: Apache-2.0
#include "wire/prefix_body.h"

#include <bit>
#include <cstring>
#include <utility>

#include "wire/malformed.h"
#include "wire/nest.h"
#include "wire/packed_record.h"

namespace penstock::wire {
namespace {

// Reads the expected tokens; fails permanently at the first error.
class PrefixReader {
 public:
  explicit PrefixReader(std::span<const std::byte> nest) : nest_(nest) {}

  bool is_whole() const { return ok_ && nest_.at_end(); }

  NestToken take(NestTag tag) {
    if (!ok_) return {};
    const auto token = nest_.next();
    ok_ = token && token.value().tag == tag;
    return ok_ ? token.value() : NestToken{};
  }

  bool tuple(uint32_t count) {
    ok_ = take(NestTag::kTuple).count == count && ok_;
    return ok_;
  }

  int64_t integer() { return take(NestTag::kInteger).integer; }

  std::vector<int64_t> integers() {
    std::vector<int64_t> values;
    for (uint32_t left = take(NestTag::kList).count; left > 0 && ok_; --left) values.push_back(integer());
    return values;
  }

  std::vector<PrefixLeaf> leaves() {
    std::vector<PrefixLeaf> leaves;
    for (uint32_t left = take(NestTag::kList).count; left > 0 && tuple(4); --left) {
      const int64_t leaf_index = integer();
      const int64_t dtype = integer();
      auto sizes = integers();
      auto strides = integers();
      ok_ = ok_ && leaf_index >= 0 && leaf_index < kTensorCountMax && dtype >= 0 && dtype <= 255 &&
            dtype_bytes(static_cast<DTypeCode>(dtype)) > 0;
      if (!ok_) break;
      leaves.push_back({.leaf_index = static_cast<uint32_t>(leaf_index),
                        .dtype = static_cast<DTypeCode>(dtype),
                        .sizes = std::move(sizes),
                        .strides = std::move(strides)});
    }
    return leaves;
  }

  Numerics numerics() {
    Numerics numerics{};
    const std::string_view bytes = take(NestTag::kBytes).text;
    ok_ = ok_ && bytes.size() == sizeof numerics;
    if (ok_) std::memcpy(&numerics, bytes.data(), sizeof numerics);
    return numerics;
  }

  PrefixSettings settings() {
    tuple(6);
    PrefixSettings settings;
    settings.flushes_denormals = integer_to(1) == 1;
    settings.is_deterministic = integer_to(1) == 1;
    settings.uses_mkldnn = integer_to(1) == 1;
    settings.matmul_precision = static_cast<uint8_t>(integer_to(kPrecisionMax));
    settings.convolution_precision = static_cast<uint8_t>(integer_to(kPrecisionMax));
    settings.default_dtype = static_cast<DTypeCode>(integer_to(255));
    ok_ = ok_ && dtype_bytes(settings.default_dtype) > 0;
    return settings;
  }

 private:
  static constexpr int64_t kPrecisionMax = 5;

  int64_t integer_to(int64_t max) {
    const int64_t value = integer();
    ok_ = ok_ && value >= 0 && value <= max;
    return value;
  }

  NestReader nest_;
  bool ok_ = true;
};

void write_integers(NestWriter& nest, std::span<const int64_t> values) {
  nest.list(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) nest.integer(value);
}

}  // namespace

std::vector<std::byte> write_prefix_body(const PrefixBody& body) {
  NestWriter nest;
  nest.tuple(6);
  nest.text(body.text);
  nest.integer(std::bit_cast<int64_t>(body.seed));
  nest.bytes(body.library);
  nest.list(static_cast<uint32_t>(body.library_leaves.size()));
  for (const PrefixLeaf& leaf : body.library_leaves) {
    nest.tuple(4);
    nest.integer(leaf.leaf_index);
    nest.integer(leaf.dtype);
    write_integers(nest, leaf.sizes);
    write_integers(nest, leaf.strides);
  }
  nest.bytes({reinterpret_cast<const char*>(body.numerics.data()), sizeof(Numerics)});
  const PrefixSettings& settings = body.settings;
  nest.tuple(6);
  for (const int64_t value :
       {int64_t{settings.flushes_denormals}, int64_t{settings.is_deterministic}, int64_t{settings.uses_mkldnn},
        int64_t{settings.matmul_precision}, int64_t{settings.convolution_precision}, int64_t{settings.default_dtype}})
    nest.integer(value);
  Frame frame{.tensors = {}, .boundary_keys = {}, .nest = nest.view()};
  std::vector<std::span<const std::byte>> sources;
  for (const PrefixConstant& constant : body.constants) {
    frame.tensors.push_back(constant.entry);
    sources.push_back(constant.bytes);
  }
  return write_packed_record(std::move(frame), sources);
}

Result<PrefixBody> parse_prefix_body(std::span<const std::byte> bytes) {
  auto packed = parse_packed_record(bytes);
  if (!packed) return packed.error();
  PrefixReader nest(packed.value().frame.nest);
  PrefixBody body;
  nest.tuple(6);
  body.text = nest.take(NestTag::kText).text;
  body.seed = std::bit_cast<uint64_t>(nest.integer());
  body.library = nest.take(NestTag::kBytes).text;
  body.library_leaves = nest.leaves();
  body.numerics = nest.numerics();
  body.settings = nest.settings();
  if (!nest.is_whole()) return malformed("a message with a prefix", "its nest does not describe a prefix");
  for (TensorEntry& entry : packed.value().frame.tensors) {
    const auto constant = packed.value().bytes_of(entry);
    body.constants.push_back({.entry = std::move(entry), .bytes = constant});
  }
  return body;
}

}  // namespace penstock::wire
