// SPDX-License-Identifier: Apache-2.0
#include "dataset/packed_value.h"

#include <utility>

#include "dataset/nest_value.h"
#include "wire/frame.h"
#include "wire/packed_record.h"

namespace penstock::dataset {

Result<std::vector<std::byte>> pack_value(const Value& value) {
  const auto nested = write_value(value);
  if (!nested) return nested.error();
  if (!nested.value().tensors.empty())
    return Fault{Errc::kMalformed, "a state must consist of numbers, text, lists and dicts, got a tensor"};
  return wire::write_packed_record({.tensors = {}, .boundary_keys = {}, .nest = nested.value().nest.view()}, {});
}

Result<Value> unpack_value(std::span<const std::byte> bytes) {
  const auto packed = wire::parse_packed_record(bytes);
  if (!packed) return packed.error();
  const wire::Frame& frame = packed.value().frame;
  constexpr bool kAllowPickle = false;
  if (auto checked = wire::check_nest(frame.nest, 0, kAllowPickle); !checked) return checked.error();
  return read_value(frame.nest, {});
}

}  // namespace penstock::dataset
