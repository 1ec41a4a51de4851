// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sample or a batch as one value: a tensor, a number, text, or a nest of these.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/error.h"
#include "penstock/export.h"

namespace penstock {

namespace detail {

// A struct whose fields are named with PENSTOCK_FIELDS.
template <typename T>
concept HasFields = requires(const T* type) {
  penstock_fields(type);
};

}  // namespace detail

// A value type: copies share the memory of their tensors, as copies of a tensor do. Reading it as another kind throws
// an Error of kind kValue that names its actual kind.
//
//   Value sample = Value::dict({{"image", image}, {"label", 3}});
//   sample["image"].tensor().size(0);
//   sample["label"].integer();  // 3
class PENSTOCK_API Value {
 public:
  struct Entry;
  using Items = std::vector<Value>;
  using Entries = std::vector<Entry>;

  enum class Kind : uint8_t {
    kNone,
    kBoolean,
    kInteger,
    kNumber,  // a double
    kText,
    kBytes,
    kTensor,
    kList,
    kTuple,  // including Python's named tuples, and objects of other classes with several parts
    kDict,   // in insertion order
  };

  inline Value();
  inline Value(std::nullopt_t);
  inline Value(bool value);
  template <std::integral T>
  requires(!std::same_as<T, bool>) Value(T value);
  inline Value(double value);
  inline Value(float value);
  inline Value(std::string value);
  inline Value(std::string_view value);
  inline Value(const char* value);
  inline Value(at::Tensor value);
  template <detail::HasFields T>
  Value(T structure);  // a dict (fields.h)

  static Value list(Items items);
  static Value tuple(Items items);
  static Value dict(Entries entries);
  static Value bytes(std::string bytes);
  // Parses a JSON text: an object becomes a dict, a number without a fraction an integer. Throws for malformed text and
  // for integers beyond 64 bits.
  static Value from_json(std::string_view text);

  // The JSON of a value without tensors and bytes; throws if the value contains any.
  std::string to_json() const;

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool is_none() const { return kind() == Kind::kNone; }
  bool is_tensor() const { return kind() == Kind::kTensor; }

  const at::Tensor& tensor() const;
  bool boolean() const;
  int64_t integer() const;
  double number() const;  // of an integer too
  const std::string& text() const;
  const std::string& bytes() const;
  const Items& items() const;      // of a list or a tuple
  const Entries& entries() const;  // of a dict

  // The number of parts of a list, a tuple or a dict.
  size_t size() const;
  // A part of a list or a tuple by position.
  const Value& operator[](size_t index) const;
  // A part of a dict by name.
  const Value& operator[](std::string_view name) const;
  // Like operator[], but null if the name is missing.
  const Value* find(std::string_view name) const;

  // The Python class of a named tuple, or of an object that is no list, tuple or dict, as "module:qualified name": the
  // value of a BatchEncoding is a dict with the type name "transformers.tokenization_utils_base:BatchEncoding". Empty
  // for other values.
  std::string_view type_name() const { return type_ ? std::string_view(*type_) : std::string_view(); }
  // The value with a type name.
  static Value of_type(std::string type_name, Value value);

  // A short description for messages: "a dict with 'image' and 'label'".
  std::string describe() const;

 private:
  struct Bytes {
    std::string bytes;
  };
  struct Tuple {
    Items items;
  };
  struct Dict {
    Entries entries;
  };
  using Data = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, at::Tensor, Items, Tuple, Dict>;

  Data data_;
  std::shared_ptr<const std::string> type_;  // shared by copies; null without a type name
};

// One entry of a dict. Python's keys may be of other types than text.
struct Value::Entry {
  Value key;
  Value value;
};

// Defined here because constructors need the complete Entry type.
inline Value::Value() = default;
inline Value::Value(std::nullopt_t) {}
inline Value::Value(bool value) : data_(value) {}
template <std::integral T>
requires(!std::same_as<T, bool>) Value::Value(T value) : data_(static_cast<int64_t>(value)) {}
inline Value::Value(double value) : data_(value) {}
inline Value::Value(float value) : data_(static_cast<double>(value)) {}
inline Value::Value(std::string value) : data_(std::move(value)) {}
inline Value::Value(std::string_view value) : data_(std::string(value)) {}
inline Value::Value(const char* value) : data_(std::string(value)) {}
inline Value::Value(at::Tensor value) : data_(std::move(value)) {}

}  // namespace penstock
