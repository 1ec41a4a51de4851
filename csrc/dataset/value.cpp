// SPDX-License-Identifier: Apache-2.0
#include "penstock/value.h"

#include <string>
#include <utility>

#include "penstock/fields.h"

namespace penstock {
namespace {

constexpr size_t kNamesShown = 8;

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

[[noreturn]] void throw_wrong_kind(const Value& value, const char* wanted) {
  throw Error(ErrorKind::kValue, "a value is " + value.describe() + "; " + wanted +
                                     " was requested; check the values of the dataset, or read it as its type");
}

}  // namespace

Value Value::list(Items items) {
  Value value;
  value.data_ = std::move(items);
  return value;
}

Value Value::tuple(Items items) {
  Value value;
  value.data_ = Tuple{std::move(items)};
  return value;
}

Value Value::dict(Entries entries) {
  Value value;
  value.data_ = Dict{std::move(entries)};
  return value;
}

Value Value::bytes(std::string bytes) {
  Value value;
  value.data_ = Bytes{std::move(bytes)};
  return value;
}

Value Value::of_type(std::string type_name, Value value) {
  value.type_ = type_name.empty() ? nullptr : std::make_shared<const std::string>(std::move(type_name));
  return value;
}

const at::Tensor& Value::tensor() const {
  if (const auto* tensor = std::get_if<at::Tensor>(&data_)) return *tensor;
  throw_wrong_kind(*this, "a tensor");
}

bool Value::boolean() const {
  if (const auto* boolean = std::get_if<bool>(&data_)) return *boolean;
  throw_wrong_kind(*this, "a boolean");
}

int64_t Value::integer() const {
  if (const auto* integer = std::get_if<int64_t>(&data_)) return *integer;
  throw_wrong_kind(*this, "an integer");
}

double Value::number() const {
  if (const auto* number = std::get_if<double>(&data_)) return *number;
  if (const auto* integer = std::get_if<int64_t>(&data_)) return static_cast<double>(*integer);
  throw_wrong_kind(*this, "a number");
}

const std::string& Value::text() const {
  if (const auto* text = std::get_if<std::string>(&data_)) return *text;
  throw_wrong_kind(*this, "text");
}

const std::string& Value::bytes() const {
  if (const auto* bytes = std::get_if<Bytes>(&data_)) return bytes->bytes;
  throw_wrong_kind(*this, "bytes");
}

const Value::Items& Value::items() const {
  if (const auto* items = std::get_if<Items>(&data_)) return *items;
  if (const auto* tuple = std::get_if<Tuple>(&data_)) return tuple->items;
  throw_wrong_kind(*this, "a list");
}

const Value::Entries& Value::entries() const {
  if (const auto* dict = std::get_if<Dict>(&data_)) return dict->entries;
  throw_wrong_kind(*this, "a dict");
}

size_t Value::size() const { return kind() == Kind::kDict ? entries().size() : items().size(); }

const Value& Value::operator[](size_t index) const {
  if (kind() != Kind::kList && kind() != Kind::kTuple) throw_wrong_kind(*this, "a part by its place");
  if (index < items().size()) return items()[index];
  throw Error(ErrorKind::kValue, "part " + std::to_string(index) + " was requested from " + describe());
}

const Value& Value::operator[](std::string_view name) const {
  if (kind() != Kind::kDict) throw_wrong_kind(*this, ("the part " + in_quotes(name)).c_str());
  if (const Value* found = find(name)) return *found;
  throw Error(ErrorKind::kValue, "the part " + in_quotes(name) + " was requested from " + describe());
}

const Value* Value::find(std::string_view name) const {
  if (kind() != Kind::kDict) return nullptr;
  for (const Entry& entry : entries())
    if (entry.key.kind() == Kind::kText && entry.key.text() == name) return &entry.value;
  return nullptr;
}

std::string Value::describe() const {
  switch (kind()) {
    case Kind::kNone: return "none";
    case Kind::kBoolean: return boolean() ? "true" : "false";
    case Kind::kInteger: return std::to_string(integer());
    case Kind::kNumber: return std::to_string(number());
    case Kind::kText:
      return text().size() > 40 ? "a text of " + std::to_string(text().size()) + " bytes" : in_quotes(text());
    case Kind::kBytes: return std::to_string(bytes().size()) + " bytes";
    case Kind::kTensor: return "a tensor";
    case Kind::kList: return "a list of " + std::to_string(size());
    case Kind::kTuple: return "a tuple of " + std::to_string(size());
    case Kind::kDict: break;
  }
  if (entries().empty()) return "an empty dict";
  std::string names;
  for (size_t index = 0; index < std::min(size(), kNamesShown); ++index)
    names += (index > 0 ? ", " : "") + entries()[index].key.describe();
  if (size() > kNamesShown) names += " and " + std::to_string(size() - kNamesShown) + " more";
  return "a dict with " + names;
}

namespace detail {

void throw_misfit(const std::string& where, const std::string& wanted, const Value& seen) {
  throw Error(ErrorKind::kValue, where + " is " + seen.describe() + "; " + wanted +
                                     " is expected; check the values of the dataset, or change the type to read");
}

const Value& field_of(const Value& value, std::string_view field, size_t position, size_t field_count,
                      const char* type_name, const std::string& where) {
  if (value.kind() == Value::Kind::kDict) {
    if (const Value* found = value.find(field)) return *found;
    throw Error(ErrorKind::kValue, where + " is read as a " + type_name + ", whose field " + in_quotes(field) +
                                       " is missing: it is " + value.describe() +
                                       "; use the dataset's name of the field");
  }
  if (value.kind() != Value::Kind::kList && value.kind() != Value::Kind::kTuple)
    throw_misfit(where, std::string("a dict or a list, for a ") + type_name, value);
  if (value.size() != field_count) {
    throw Error(ErrorKind::kValue, where + " is read as a " + type_name + " of " + std::to_string(field_count) +
                                       " fields, but it is " + value.describe() +
                                       "; a struct requires a list with one part for each field");
  }
  return value[position];
}

const Value::Items& parts_of(const Value& value, size_t count, const std::string& where) {
  const bool is_sequence = value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple;
  if (!is_sequence || value.size() != count) throw_misfit(where, "a list or tuple of " + std::to_string(count), value);
  return value.items();
}

}  // namespace detail
}  // namespace penstock
