// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions between values and C++ types: the types that batch.as<T>() can return and that a dataset may return.
// Supported types: bool, integers, floating-point numbers, std::string, std::vector<std::byte> (bytes), at::Tensor,
// Value, std::optional (none is empty), std::vector (a list), std::map of std::string (a dict), std::pair and
// std::tuple (by position), and every struct whose fields are named:
//
//   struct Sample {
//     at::Tensor image;
//     at::Tensor label;
//   };
//   PENSTOCK_FIELDS(Sample, image, label)  // in the struct's namespace
//
// A struct becomes a dict with its fields' names, so a function that returns a Value may return the struct. The other
// types become values by to_value(). A struct is read from a dict by name, from a list or tuple by position. To support
// another type, specialise Conversion.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "penstock/value.h"

namespace penstock {

// Converts between T and Value. `where` names the value in messages, such as "batch['image']".
template <typename T>
struct Conversion;

namespace detail {

[[noreturn]] PENSTOCK_API void throw_misfit(const std::string& where, const std::string& wanted, const Value& seen);
// The part that a field of a struct is read from. Throws if it is missing.
PENSTOCK_API const Value& field_of(const Value& value, std::string_view field, size_t position, size_t field_count,
                                   const char* type_name, const std::string& where);
PENSTOCK_API const Value::Items& parts_of(const Value& value, size_t count, const std::string& where);

template <typename Type, typename Member>
struct Field {
  std::string_view name;
  Member Type::*member;
};
template <typename Type, typename Member>
Field(std::string_view, Member Type::*) -> Field<Type, Member>;

template <typename... Fields>
struct StructFields {
  const char* type_name;
  std::tuple<Fields...> fields;
};
template <typename... Fields>
StructFields(const char*, std::tuple<Fields...>) -> StructFields<Fields...>;

}  // namespace detail

template <>
struct Conversion<Value> {
  static Value to_value(Value value) { return value; }
  static Value from_value(const Value& value, const std::string&) { return value; }
};

template <>
struct Conversion<at::Tensor> {
  static Value to_value(at::Tensor tensor) { return {std::move(tensor)}; }
  static at::Tensor from_value(const Value& value, const std::string& where) {
    if (!value.is_tensor()) detail::throw_misfit(where, "a tensor", value);
    return value.tensor();
  }
};

template <>
struct Conversion<bool> {
  static Value to_value(bool value) { return {value}; }
  static bool from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kBoolean) detail::throw_misfit(where, "a boolean", value);
    return value.boolean();
  }
};

template <std::integral T>
requires(!std::same_as<T, bool>) struct Conversion<T> {
  static Value to_value(T value) { return {static_cast<int64_t>(value)}; }
  static T from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kInteger || !std::in_range<T>(value.integer()))
      detail::throw_misfit(where, "an integer in the range of its type", value);
    return static_cast<T>(value.integer());
  }
};

template <std::floating_point T>
struct Conversion<T> {
  static Value to_value(T value) { return {static_cast<double>(value)}; }
  static T from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kNumber && value.kind() != Value::Kind::kInteger)
      detail::throw_misfit(where, "a number", value);
    return static_cast<T>(value.number());
  }
};

template <>
struct Conversion<std::string> {
  static Value to_value(std::string text) { return {std::move(text)}; }
  static std::string from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kText) detail::throw_misfit(where, "text", value);
    return value.text();
  }
};

template <typename T>
struct Conversion<std::optional<T>> {
  static Value to_value(std::optional<T> value) { return value ? Conversion<T>::to_value(*std::move(value)) : Value(); }
  static std::optional<T> from_value(const Value& value, const std::string& where) {
    if (value.is_none()) return std::nullopt;
    return Conversion<T>::from_value(value, where);
  }
};

template <>
struct Conversion<std::vector<std::byte>> {
  static Value to_value(const std::vector<std::byte>& bytes) {
    return Value::bytes(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  static std::vector<std::byte> from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kBytes) detail::throw_misfit(where, "bytes", value);
    const auto* first = reinterpret_cast<const std::byte*>(value.bytes().data());
    return {first, first + value.bytes().size()};
  }
};

template <typename T>
struct Conversion<std::map<std::string, T>> {
  static Value to_value(std::map<std::string, T> parts) {
    Value::Entries entries;
    entries.reserve(parts.size());
    for (auto& [name, part] : parts) entries.push_back({name, Conversion<T>::to_value(std::move(part))});
    return Value::dict(std::move(entries));
  }
  static std::map<std::string, T> from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kDict) detail::throw_misfit(where, "a dict", value);
    std::map<std::string, T> parts;
    for (const Value::Entry& entry : value.entries()) {
      const std::string name = Conversion<std::string>::from_value(entry.key, where + " key");
      parts.emplace(name, Conversion<T>::from_value(entry.value, where + "['" + name + "']"));
    }
    return parts;
  }
};

template <typename T>
struct Conversion<std::vector<T>> {
  static Value to_value(std::vector<T> parts) {
    Value::Items items;
    items.reserve(parts.size());
    for (auto&& part : parts) items.push_back(Conversion<T>::to_value(std::move(part)));
    return Value::list(std::move(items));
  }
  static std::vector<T> from_value(const Value& value, const std::string& where) {
    if (value.kind() != Value::Kind::kList && value.kind() != Value::Kind::kTuple)
      detail::throw_misfit(where, "a list", value);
    std::vector<T> parts;
    parts.reserve(value.size());
    for (const Value& item : value.items())
      parts.push_back(Conversion<T>::from_value(item, where + "[" + std::to_string(parts.size()) + "]"));
    return parts;
  }
};

template <typename... Ts>
struct Conversion<std::tuple<Ts...>> {
  static Value to_value(std::tuple<Ts...> parts) {
    Value::Items items;
    items.reserve(sizeof...(Ts));
    std::apply([&](Ts&... part) { (items.push_back(Conversion<Ts>::to_value(std::move(part))), ...); }, parts);
    return Value::tuple(std::move(items));
  }
  static std::tuple<Ts...> from_value(const Value& value, const std::string& where) {
    const Value::Items& items = detail::parts_of(value, sizeof...(Ts), where);
    return convert(items, where, std::index_sequence_for<Ts...>());
  }

 private:
  template <size_t... Places>
  static std::tuple<Ts...> convert(const Value::Items& items, const std::string& where,
                                   std::index_sequence<Places...>) {
    return std::tuple<Ts...>{Conversion<Ts>::from_value(items[Places], where + "[" + std::to_string(Places) + "]")...};
  }
};

template <typename First, typename Second>
struct Conversion<std::pair<First, Second>> {
  static Value to_value(std::pair<First, Second> pair) {
    return Conversion<std::tuple<First, Second>>::to_value({std::move(pair.first), std::move(pair.second)});
  }
  static std::pair<First, Second> from_value(const Value& value, const std::string& where) {
    auto [first, second] = Conversion<std::tuple<First, Second>>::from_value(value, where);
    return {std::move(first), std::move(second)};
  }
};

template <detail::HasFields T>
struct Conversion<T> {
  static Value to_value(T structure) {
    return std::apply(
        [&](const auto&... field) {
          return Value::dict({{Value(field.name), convert_field(std::move(structure.*field.member))}...});
        },
        penstock_fields(static_cast<const T*>(nullptr)).fields);
  }

  static T from_value(const Value& value, const std::string& where) {
    const auto described = penstock_fields(static_cast<const T*>(nullptr));
    T structure{};
    std::apply([&](const auto&... field) { read_fields(structure, value, where, described.type_name, field...); },
               described.fields);
    return structure;
  }

 private:
  template <typename Member>
  static Value convert_field(Member member) {
    return Conversion<Member>::to_value(std::move(member));
  }

  template <typename... Members>
  static void read_fields(T& structure, const Value& value, const std::string& where, const char* type_name,
                          const detail::Field<T, Members>&... field) {
    size_t position = 0;
    const auto read = [&]<typename Member>(const detail::Field<T, Member>& one) {
      const Value& part = detail::field_of(value, one.name, position++, sizeof...(Members), type_name, where);
      structure.*one.member = Conversion<Member>::from_value(part, where + "['" + std::string(one.name) + "']");
    };
    (read(field), ...);
  }
};

template <detail::HasFields T>
Value::Value(T structure) : Value(Conversion<T>::to_value(std::move(structure))) {}

// Converts any type that has a Conversion to a Value.
template <typename T>
Value to_value(T&& object) {
  return Conversion<std::remove_cvref_t<T>>::to_value(std::forward<T>(object));
}

}  // namespace penstock

// ---- PENSTOCK_FIELDS(Type, field, ...): names the fields of a struct, at most 64

#define PENSTOCK_DETAIL_PARENS ()
#define PENSTOCK_DETAIL_EXPAND(...) \
  PENSTOCK_DETAIL_EXPAND_3(PENSTOCK_DETAIL_EXPAND_3(PENSTOCK_DETAIL_EXPAND_3(PENSTOCK_DETAIL_EXPAND_3(__VA_ARGS__))))
#define PENSTOCK_DETAIL_EXPAND_3(...) \
  PENSTOCK_DETAIL_EXPAND_2(PENSTOCK_DETAIL_EXPAND_2(PENSTOCK_DETAIL_EXPAND_2(PENSTOCK_DETAIL_EXPAND_2(__VA_ARGS__))))
#define PENSTOCK_DETAIL_EXPAND_2(...) \
  PENSTOCK_DETAIL_EXPAND_1(PENSTOCK_DETAIL_EXPAND_1(PENSTOCK_DETAIL_EXPAND_1(PENSTOCK_DETAIL_EXPAND_1(__VA_ARGS__))))
#define PENSTOCK_DETAIL_EXPAND_1(...) __VA_ARGS__
#define PENSTOCK_DETAIL_EACH_FIELD(Type, field, ...) \
  ::penstock::detail::Field{                         \
      #field, &Type::field} __VA_OPT__(, PENSTOCK_DETAIL_NEXT_FIELD PENSTOCK_DETAIL_PARENS(Type, __VA_ARGS__))
#define PENSTOCK_DETAIL_NEXT_FIELD() PENSTOCK_DETAIL_EACH_FIELD

#define PENSTOCK_FIELDS(Type, ...)                                                                        \
  [[maybe_unused]] inline auto penstock_fields(const Type*) {                                             \
    return ::penstock::detail::StructFields{                                                              \
        #Type, ::std::make_tuple(PENSTOCK_DETAIL_EXPAND(PENSTOCK_DETAIL_EACH_FIELD(Type, __VA_ARGS__)))}; \
  }
