// SPDX-License-Identifier: Apache-2.0
#include "dataset/nest_value.h"

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::dataset {
namespace {

using Kind = Value::Kind;
using wire::NestTag;

Result<void> write(const Value& value, uint32_t depth, NestedTensors& to) {
  if (depth >= wire::kNestDepthMax) {
    return Fault{Errc::kMalformed,
                 "a batch is nested deeper than " + std::to_string(wire::kNestDepthMax) + " levels; flatten it"};
  }
  wire::NestWriter& nest = to.nest;
  switch (value.kind()) {
    case Kind::kNone: nest.none(); return {};
    case Kind::kBoolean: nest.boolean(value.boolean()); return {};
    case Kind::kInteger: nest.integer(value.integer()); return {};
    case Kind::kNumber: nest.floating(value.number()); return {};
    case Kind::kText: nest.text(value.text()); return {};
    case Kind::kBytes: nest.bytes(value.bytes()); return {};
    case Kind::kTensor:
      if (!value.tensor().defined())
        return Fault{Errc::kMalformed, "a batch contains an undefined tensor; define or omit it"};
      nest.tensor(static_cast<uint32_t>(to.tensors.size()));
      to.tensors.push_back(value.tensor());
      return {};
    case Kind::kList:
    case Kind::kTuple: {
      const auto count = static_cast<uint32_t>(value.size());
      value.kind() == Kind::kList ? nest.list(count) : nest.tuple(count);
      for (const Value& item : value.items())
        if (auto written = write(item, depth + 1, to); !written) return written;
      return {};
    }
    case Kind::kDict:
      nest.dict(static_cast<uint32_t>(value.size()));
      for (const Value::Entry& entry : value.entries()) {
        if (auto written = write(entry.key, depth + 1, to); !written) return written;
        if (auto written = write(entry.value, depth + 1, to); !written) return written;
      }
      return {};
  }
  return {};
}

template <typename T>
T element_as(std::string_view bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// A numpy number, in this machine's byte order.
std::optional<Value> read_scalar(std::string_view dtype, std::string_view element) {
  if (dtype == "|b1") return Value(element[0] != 0);
  if (dtype == "|i1") return Value(element_as<int8_t>(element));
  if (dtype == "|u1") return Value(element_as<uint8_t>(element));
  if (dtype == "<i2") return Value(element_as<int16_t>(element));
  if (dtype == "<u2") return Value(element_as<uint16_t>(element));
  if (dtype == "<i4") return Value(element_as<int32_t>(element));
  if (dtype == "<u4") return Value(element_as<uint32_t>(element));
  if (dtype == "<i8") return Value(element_as<int64_t>(element));
  if (dtype == "<f4") return Value(element_as<float>(element));
  if (dtype == "<f8") return Value(element_as<double>(element));
  return std::nullopt;
}

class Reader {
 public:
  Reader(std::span<const std::byte> nest, std::span<const at::Tensor> tensors) : tokens_(nest), tensors_(tensors) {}

  Result<Value> read() {
    const wire::NestToken token = tokens_.next().value();  // already checked
    switch (token.tag) {
      case NestTag::kNone: return Value();
      case NestTag::kFalse: return Value(false);
      case NestTag::kTrue: return Value(true);
      case NestTag::kInteger: return Value(token.integer);
      case NestTag::kFloat: return Value(token.floating);
      case NestTag::kText: return Value(token.text);
      case NestTag::kBytes: return Value::bytes(std::string(token.text));
      case NestTag::kTensor: return Value(tensors_[token.count]);
      case NestTag::kArray:
        if (token.dtype.empty()) return Value(tensors_[token.count]);
        return refuse("a numpy array of dtype " + std::string(token.dtype));
      case NestTag::kScalar:
        if (auto number = read_scalar(token.dtype, token.text)) return *std::move(number);
        return refuse("a numpy scalar of dtype " + std::string(token.dtype));
      case NestTag::kBigInteger: return refuse("an integer of more than 64 bits");
      case NestTag::kPickle: return refuse("a pickled Python object");
      case NestTag::kList: return read_items(token.count, &Value::list);
      case NestTag::kTuple: return read_items(token.count, &Value::tuple);
      case NestTag::kNamedTuple: return of_type(std::string(token.text), read_items(token.count, &Value::tuple));
      case NestTag::kObject: return of_type(std::string(token.text), read_object(token.count));
      case NestTag::kDict: {
        Value::Entries entries;
        entries.reserve(token.count);
        for (uint32_t index = 0; index < token.count; ++index) {
          auto key = read();
          if (!key) return key;
          auto value = read();
          if (!value) return value;
          entries.push_back({.key = std::move(key).value(), .value = std::move(value).value()});
        }
        return Value::dict(std::move(entries));
      }
    }
    return Value();
  }

 private:
  Result<Value> read_items(uint32_t count, Value (*make)(Value::Items)) {
    Value::Items items;
    items.reserve(count);
    for (uint32_t index = 0; index < count; ++index) {
      auto item = read();
      if (!item) return item;
      items.push_back(std::move(item).value());
    }
    return make(std::move(items));
  }

  static Result<Value> of_type(std::string type_name, Result<Value> value) {
    if (!value) return value;
    return Value::of_type(std::move(type_name), std::move(value).value());
  }

  // An object of a Python class is its context if it has no children, its only child, as for mappings, or the tuple of
  // its children.
  Result<Value> read_object(uint32_t count) {
    auto context = read();
    if (!context || count == 1) return context;
    if (count == 2) return read();
    return read_items(count - 1, &Value::tuple);
  }

  static Fault refuse(const std::string& what) {
    return {Errc::kUnsupported, "the batch contains " + what +
                                    ", which has no C++ type; make it a tensor, a number or text in the dataset "
                                    "or its collate_fn"};
  }

  wire::NestReader tokens_;
  std::span<const at::Tensor> tensors_;
};

}  // namespace

Result<NestedTensors> write_value(const Value& value) {
  NestedTensors nested;
  if (auto written = write(value, 0, nested); !written) return written.error();
  return nested;
}

Value with_tensors(const Value& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  switch (value.kind()) {
    case Value::Kind::kTensor: return map(value.tensor());
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      Value::Items items;
      for (const Value& item : value.items()) items.push_back(with_tensors(item, map));
      return Value::of_type(std::string(value.type_name()), value.kind() == Value::Kind::kList
                                                                ? Value::list(std::move(items))
                                                                : Value::tuple(std::move(items)));
    }
    case Value::Kind::kDict: {
      Value::Entries entries;
      for (const Value::Entry& entry : value.entries())
        entries.push_back({.key = entry.key, .value = with_tensors(entry.value, map)});
      return Value::of_type(std::string(value.type_name()), Value::dict(std::move(entries)));
    }
    default: return value;
  }
}

Result<Value> read_value(std::span<const std::byte> nest, std::span<const at::Tensor> tensors) {
  return Reader(nest, tensors).read();
}

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
