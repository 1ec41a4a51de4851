// SPDX-License-Identifier: Apache-2.0
#include "bindings/plain_nest.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/python_array.h"
#include "bindings/python_nest.h"
#include "bindings/raise.h"
#include "wire/frame.h"
#include "worker/slab_writer.h"

namespace py = pybind11;

namespace penstock::bindings {

using wire::NestWriter;

namespace {

constexpr size_t kKeyCharactersShown = 60;

std::string type_name(py::handle object) {
  const py::handle type = py::type::handle_of(object);
  const auto module = py::str(type.attr("__module__")).cast<std::string>();
  const auto name = py::str(type.attr("__qualname__")).cast<std::string>();
  return module == "builtins" ? name : module + "." + name;
}

// The reason why a tensor cannot be in the tensor table, worded to follow "a torch.Tensor".
std::string tensor_refusal(const at::Tensor& tensor) {
  if (tensor.requires_grad()) return " that requires grad";
  if (tensor.layout() != at::kStrided) return " of the layout " + c10::str(tensor.layout());
  if (!tensor.device().is_cpu()) return " on " + tensor.device().str();
  return " that is not a plain tensor of numbers";
}

class PlainEncoder {
 public:
  PlainEncoder(EncodedNest& result, std::string_view name) : result_(result), name_(name) {}

  void encode(py::handle object) {
    encode_value(object);
    if (result_.nest.view().size() > wire::kNestBytesMax) {
      refuse("needs more than " + std::to_string(wire::kNestBytesMax) +
             " bytes, including the parts before it and excluding tensors; put long texts and lists of numbers into "
             "tensors");
    }
  }

 private:
  // A container that is being written, and the key or index of its current part.
  struct Step {
    PyObject* container;
    py::object part;
    bool is_field = false;
  };

  struct Array {
    py::object object;  // kept alive: it may be a temporary copy, and its address identifies it
    std::string dtype;
  };

  void encode_value(py::handle object) {
    NestWriter& nest = result_.nest;
    PyObject* const value = object.ptr();
    if (is_exact_tensor(value)) return encode_tensor(object);
    if (value == Py_None) return nest.none();
    if (PyBool_Check(value)) return nest.boolean(value == Py_True);
    if (PyLong_CheckExact(value)) return encode_integer(object);
    if (PyFloat_CheckExact(value)) return nest.floating(PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) return encode_text(object);
    if (PyBytes_CheckExact(value))
      return nest.bytes(fitting({PyBytes_AS_STRING(value), length(PyBytes_GET_SIZE(value))}));
    if (PyList_CheckExact(value)) return encode_list(object);
    if (PyTuple_CheckExact(value)) {
      nest.tuple(static_cast<uint32_t>(PyTuple_GET_SIZE(value)));
      return encode_items(object);
    }
    if (PyDict_CheckExact(value)) return encode_dict(object);
    if (PyTuple_Check(value) && is_named_tuple(object)) return encode_named_tuple(object);
    if (is_exact_array(object)) return encode_array(object);
    if (is_array_scalar(object)) return encode_scalar(object);
    if (const auto flat = flatten_object(object, false)) return encode_object(object, *flat);
    refuse_type("a " + type_name(object));
  }

  void encode_tensor(py::handle object) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (is_in_key_) refuse_type("a torch.Tensor as a key");
    if (has_components(tensor)) {
      if (const auto flat = flatten_object(object, false)) return encode_object(object, *flat);
    }
    if (!worker::is_plain_tensor(tensor)) refuse_type("a torch.Tensor" + tensor_refusal(tensor));
    result_.nest.tensor(place_of(tensor.unsafeGetTensorImpl(), [&] { return tensor; }));
  }

  void encode_array(py::handle array) {
    if (is_in_key_) refuse_type("a numpy.ndarray as a key");
    Array& known = arrays_[array.ptr()];
    const uint32_t place = place_of(array.ptr(), [&] {
      auto parts = decompose_array(array);
      if (!parts) refuse_type("a numpy.ndarray of dtype " + py::str(array.attr("dtype")).cast<std::string>());
      known = {.object = py::reinterpret_borrow<py::object>(array), .dtype = std::move(parts->dtype)};
      return parts->tensor;
    });
    result_.nest.array(place, known.dtype);
  }

  void encode_scalar(py::handle scalar) {
    const auto parts = decompose_scalar(scalar);
    if (!parts)
      refuse_type("a " + type_name(scalar) + " of dtype " + py::str(scalar.attr("dtype")).cast<std::string>());
    result_.nest.scalar(parts->dtype, fitting(parts->element));
  }

  void encode_integer(py::handle object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow == 0) return result_.nest.integer(value);
    const auto bytes = object.attr("bit_length")().cast<uint64_t>() / 8 + 1;  // including room for the sign
    if (bytes > wire::kBigIntegerBytesMax) {
      refuse_type("an int of " + std::to_string(bytes) + " bytes, above " + std::to_string(wire::kBigIntegerBytesMax));
    }
    const py::object digits = object.attr("to_bytes")(bytes, "little", py::arg("signed") = true);
    result_.nest.big_integer(static_cast<std::string_view>(py::reinterpret_borrow<py::bytes>(digits)));
  }

  void encode_text(py::handle object) {
    Py_ssize_t size = 0;
    if (const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size)) {
      return result_.nest.text(fitting({text, length(size)}));
    }
    PyErr_Clear();  // lone surrogates
    const py::object passed = object.attr("encode")("utf-8", "surrogatepass");
    result_.nest.text(fitting(static_cast<std::string_view>(py::reinterpret_borrow<py::bytes>(passed))));
  }

  // Iterates over copies of lists and dicts, since another thread may change them while numpy copies an array.
  void encode_list(py::handle list) {
    const auto items = py::reinterpret_steal<py::object>(PyList_AsTuple(list.ptr()));
    if (!items) throw py::error_already_set();
    result_.nest.list(static_cast<uint32_t>(PyTuple_GET_SIZE(items.ptr())));
    encode_items(items, list);
  }

  void encode_items(py::handle items) { encode_items(items, items); }

  void encode_items(py::handle items, py::handle container) {
    enter(container);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(items.ptr()); ++index) {
      steps_.back().part = py::int_(index);
      encode(PyTuple_GET_ITEM(items.ptr(), index));
    }
    steps_.pop_back();
  }

  void encode_named_tuple(py::handle tuple) {
    if (is_in_key_) refuse_type("a named tuple, " + type_name(tuple) + ", as a key");
    if (const std::string why = named_tuple_refusal(tuple); !why.empty()) {
      refuse_type("a named tuple, " + type_name(tuple) + ", " + why);
    }
    result_.nest.named_tuple(named_tuple_name(tuple), static_cast<uint32_t>(PyTuple_GET_SIZE(tuple.ptr())));
    enter(tuple);
    steps_.back().is_field = true;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple.ptr()); ++index) {
      steps_.back().part = py::str(field_name(tuple, static_cast<size_t>(index)));
      encode(PyTuple_GET_ITEM(tuple.ptr(), index));
    }
    steps_.pop_back();
  }

  void encode_object(py::handle object, const FlatObject& flat) {
    if (is_in_key_) refuse_type("a " + type_name(object) + " as a key");
    kept_.push_back(flat.values);  // so that no other object gets the addresses of its parts
    result_.nest.object(flat.name, static_cast<uint32_t>(flat.values.size()));
    enter(object);
    for (py::handle value : flat.values) {
      steps_.back().part = py::str("content");
      steps_.back().is_field = true;
      encode(value);
    }
    steps_.pop_back();
  }

  void encode_dict(py::handle object) {
    const auto dict = py::reinterpret_steal<py::dict>(PyDict_Copy(object.ptr()));
    if (!dict) throw py::error_already_set();
    result_.nest.dict(static_cast<uint32_t>(dict.size()));
    enter(object);
    for (const auto& [key, value] : dict) {
      steps_.back().part = py::reinterpret_borrow<py::object>(key);
      const bool was_in_key = std::exchange(is_in_key_, true);
      encode(key);
      is_in_key_ = was_in_key;
      encode(value);
    }
    steps_.pop_back();
  }

  void enter(py::handle container) {
    const bool is_inside_itself =
        std::ranges::any_of(steps_, [&](const Step& step) { return step.container == container.ptr(); });
    if (is_inside_itself) refuse_type("a " + type_name(container) + " that contains itself");
    if (steps_.size() + 1 >= wire::kNestDepthMax) {
      refuse_type("nested deeper than " + std::to_string(wire::kNestDepthMax) + " levels");
    }
    steps_.push_back({.container = container.ptr(), .part = py::none()});
  }

  // The object's index in the tensor table. Adds the entry the first time.
  template <typename Make>
  uint32_t place_of(const void* object, Make make) {
    const auto [place, is_new] = places_.try_emplace(object, static_cast<uint32_t>(result_.tensors.size()));
    if (is_new) {
      if (result_.tensors.size() >= wire::kTensorCountMax) {
        refuse_type("a tensor or array above the limit of " + std::to_string(wire::kTensorCountMax) + " per batch");
      }
      result_.tensors.push_back(make());
    }
    return place->second;
  }

  static size_t length(Py_ssize_t size) { return static_cast<size_t>(size); }

  // Lengths are written in 32 bits.
  std::string_view fitting(std::string_view value) {
    if (value.size() > wire::kNestBytesMax) {
      refuse("has " + std::to_string(value.size()) + " bytes, above " + std::to_string(wire::kNestBytesMax) +
             "; put it into a tensor of uint8");
    }
    return value;
  }

  std::string where() const {
    std::string where(name_);
    for (const Step& step : steps_) {
      if (step.is_field) {
        where += "." + py::str(step.part).cast<std::string>();
        continue;
      }
      py::object part = py::repr(step.part);
      if (py::len(part) > kKeyCharactersShown) {
        part = py::object(part[py::slice(0, kKeyCharactersShown, 1)]) + py::str("...");
      }
      where += "[" + part.attr("encode")("utf-8", "backslashreplace").cast<std::string>() + "]";
    }
    return is_in_key_ ? "a key in " + where : where;
  }

  [[noreturn]] void refuse(const std::string& what) const { raise_error({Errc::kUnsupported, where() + " " + what}); }

  [[noreturn]] void refuse_type(const std::string& what) const {
    refuse("is " + what +
           ", which pool workers do not send; return tensors, numpy arrays, numbers, str, bytes, None and dicts, "
           "lists, tuples and named tuples of them, call penstock.register_batch_type() for its class, or pass "
           "trust_workers=True to accept pickled objects from the pool's workers");
  }

  EncodedNest& result_;
  const std::string_view name_;
  std::vector<Step> steps_;
  bool is_in_key_ = false;
  std::unordered_map<const void*, uint32_t> places_;
  std::unordered_map<const PyObject*, Array> arrays_;
  std::vector<py::object> kept_;
};

}  // namespace

EncodedNest encode_plain_nest(py::handle object, std::string_view name) {
  EncodedNest result;
  PlainEncoder(result, name).encode(object);
  return result;
}

}  // namespace penstock::bindings
