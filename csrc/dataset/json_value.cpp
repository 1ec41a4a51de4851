// SPDX-License-Identifier: Apache-2.0
// Values as JSON text.

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "penstock/value.h"
#include "wire/nest.h"

namespace penstock {
namespace {

using Json = nlohmann::ordered_json;

Value read(const Json& json, uint32_t depth) {
  if (depth >= wire::kNestDepthMax) {
    throw Error(ErrorKind::kValue,
                "a JSON text is nested deeper than " + std::to_string(wire::kNestDepthMax) + " levels");
  }
  switch (json.type()) {
    case Json::value_t::boolean: return {json.get<bool>()};
    case Json::value_t::number_integer: return {json.get<int64_t>()};
    case Json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        throw Error(ErrorKind::kValue, "a JSON text has the integer " + json.dump() + ", which must be at most " +
                                           std::to_string(INT64_MAX) + "; use a smaller one");
      }
      return {json.get<int64_t>()};
    case Json::value_t::number_float: return {json.get<double>()};
    case Json::value_t::string: return {json.get<std::string>()};
    case Json::value_t::array: {
      Value::Items items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(read(item, depth + 1));
      return Value::list(std::move(items));
    }
    case Json::value_t::object: {
      Value::Entries entries;
      entries.reserve(json.size());
      for (const auto& [key, value] : json.items()) entries.push_back({.key = key, .value = read(value, depth + 1)});
      return Value::dict(std::move(entries));
    }
    default: return {};
  }
}

Json write(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNone: return nullptr;
    case Value::Kind::kBoolean: return value.boolean();
    case Value::Kind::kInteger: return value.integer();
    case Value::Kind::kNumber:
      if (!std::isfinite(value.number()))
        throw Error(ErrorKind::kValue, "JSON cannot represent the number " + value.describe());
      return value.number();
    case Value::Kind::kText: return value.text();
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      Json array = Json::array();
      for (const Value& item : value.items()) array.push_back(write(item));
      return array;
    }
    case Value::Kind::kDict: {
      Json object = Json::object();
      for (const Value::Entry& entry : value.entries()) object[entry.key.text()] = write(entry.value);
      return object;
    }
    case Value::Kind::kBytes:
    case Value::Kind::kTensor: break;
  }
  throw Error(ErrorKind::kValue, "JSON cannot represent " + value.describe() + "; use numbers, text, lists and dicts");
}

}  // namespace

Value Value::from_json(std::string_view text) {
  try {
    return read(Json::parse(text), 0);
  } catch (const Json::exception& error) {
    throw Error(ErrorKind::kValue, std::string("a text is not valid JSON: ") + error.what());
  }
}

std::string Value::to_json() const {
  try {
    return write(*this).dump();
  } catch (const Json::exception& error) {
    throw Error(ErrorKind::kValue, std::string("a value cannot be written as JSON: ") + error.what());
  }
}

}  // namespace penstock
