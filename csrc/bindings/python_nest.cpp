// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_nest.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "bindings/python_array.h"
#include "bindings/raise.h"
#include "wire/frame.h"
#include "wire/nest.h"
#include "worker/slab_writer.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

py::object as_object(PyTypeObject& type) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&type));
}

// The attribute that a class itself stores under a name, without involving its metaclass; null if there is none.
py::object kept_by_class(py::handle type, const py::str& name) {
  const py::object names = as_object(PyType_Type).attr("__dict__")["__dict__"].attr("__get__")(type);
  return names.contains(name) ? py::object(names[name]) : py::object();
}

// The fields of a named-tuple class, its own or inherited; null for any other class.
py::object fields_of(py::handle type) {
  auto* const cls = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_Check(type.ptr()) || cls == &PyTuple_Type || !PyType_IsSubtype(cls, &PyTuple_Type)) return {};
  for (py::handle base : py::reinterpret_borrow<py::tuple>(cls->tp_mro)) {
    py::object fields = kept_by_class(base, "_fields");
    if (!fields) continue;
    if (!PyTuple_CheckExact(fields.ptr())) return {};
    const auto names = py::reinterpret_borrow<py::tuple>(fields);
    const bool are_names = std::ranges::all_of(names, [](py::handle name) { return PyUnicode_CheckExact(name.ptr()); });
    return are_names ? fields : py::object();
  }
  return {};
}

// The class or function with that qualified name in an imported module; null if there is none. Imports no module, and
// bypasses custom attribute lookup of modules and classes.
py::object find_imported(std::string_view module_name, std::string_view path) {
  const auto modules = py::reinterpret_borrow<py::dict>(PyImport_GetModuleDict());
  const py::str module_key(module_name.data(), module_name.size());
  if (!modules.contains(module_key)) return {};
  const py::object module = modules[module_key];
  if (!PyModule_Check(module.ptr())) return {};
  const auto own_names = py::reinterpret_borrow<py::dict>(PyModule_GetDict(module.ptr()));
  size_t dot = path.find('.');
  const py::str first(path.data(), std::min(dot, path.size()));
  py::object found = own_names.contains(first) ? py::object(own_names[first]) : py::object();
  while (found && dot != std::string_view::npos) {
    path.remove_prefix(dot + 1);
    dot = path.find('.');
    const py::str part(path.data(), std::min(dot, path.size()));
    found = PyType_Check(found.ptr()) ? kept_by_class(found, part) : py::object();
  }
  return found;
}

[[noreturn]] void raise_unmade(std::string_view name, const std::string& what) {
  raise_error({Errc::kUnsupported, "a batch contains a named tuple of the class '" + std::string(name) + "', " + what +
                                       "; import the module that defines it in the trainer, in the workers' version"});
}

}  // namespace

bool is_named_tuple(py::handle object) {
  const py::object fields = fields_of(py::type::handle_of(object));
  return fields && PyTuple_GET_SIZE(fields.ptr()) == PyTuple_GET_SIZE(object.ptr());
}

std::string field_name(py::handle named_tuple, size_t index) {
  const auto fields = py::reinterpret_borrow<py::tuple>(fields_of(py::type::handle_of(named_tuple)));
  return fields[index].cast<std::string>();
}

std::string named_tuple_refusal(py::handle named_tuple) {
  if (named_tuple_name(named_tuple).size() > wire::kClassNameBytesMax) return "whose class name is too long";
  if (named_tuple_name(named_tuple).find("<locals>") != std::string::npos) {
    return "whose class was made inside a function, where the trainer cannot find it";
  }
  const py::object attributes = py::getattr(named_tuple, "__dict__", py::none());
  if (!attributes.is_none() && py::len(attributes) > 0) return "which has attributes in addition to its fields";
  return "";
}

std::string named_tuple_name(py::handle named_tuple) {
  const py::handle type = py::type::handle_of(named_tuple);
  return py::str(type.attr("__module__")).cast<std::string>() + ":" +
         py::str(type.attr("__qualname__")).cast<std::string>();
}

py::object make_named_tuple(std::string_view name, const py::tuple& values) {
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "strict"));
  if (!text) {
    PyErr_Clear();
    raise_unmade("?", "whose name is not UTF-8");
  }
  const size_t colon = name.find(':');
  if (colon == std::string_view::npos) raise_unmade(name, "which contains no module name");
  const py::object type = find_imported(name.substr(0, colon), name.substr(colon + 1));
  if (!type) raise_unmade(name, "which is in no module that this process has imported");
  const py::object fields = fields_of(type);
  // A finalizer of the class would let the sender choose code to run.
  const bool has_finalizer = fields && reinterpret_cast<PyTypeObject*>(type.ptr())->tp_finalize != nullptr;
  if (!fields || has_finalizer) raise_unmade(name, "which is not a class of named tuples here");
  if (py::len(fields) != values.size()) {
    raise_unmade(name, "with " + std::to_string(values.size()) + " values where the class here has " +
                           std::to_string(py::len(fields)) + " fields");
  }
  return as_object(PyTuple_Type).attr("__new__")(type, values);
}

namespace {

struct BatchTypes {
  py::object flatten = py::none();
  py::object make = py::none();
};
// Never destroyed: Python may be gone by then.
BatchTypes& batch_types() {
  static auto& types = *new BatchTypes;
  return types;
}

}  // namespace

void set_batch_types(py::object flatten, py::object make) {
  batch_types() = {.flatten = std::move(flatten), .make = std::move(make)};
}

std::optional<FlatObject> flatten_object(py::handle object, bool is_trusted) {
  const py::object& flatten = batch_types().flatten;
  if (flatten.is_none()) return std::nullopt;
  const py::object flat = flatten(object, is_trusted);
  if (flat.is_none()) return std::nullopt;
  auto [name, values] = flat.cast<std::pair<std::string, py::tuple>>();
  if (name.size() > wire::kClassNameBytesMax || values.empty()) return std::nullopt;
  return FlatObject{.name = std::move(name), .values = std::move(values)};
}

using wire::NestReader;
using wire::NestTag;
using wire::NestToken;
using wire::NestWriter;

namespace {

constexpr uint32_t kEqualHashesMax = 64;  // limit on the keys of one dict with the same hash

// Writes tokens until it reaches an object that has none.
class NestEncoder {
 public:
  explicit NestEncoder(EncodedNest& result) : result_(result) {}

  bool encode(PyObject* object, uint32_t depth) {
    NestWriter& nest = result_.nest;
    if (is_exact_tensor(object)) return encode_tensor(object, depth);
    if (object == Py_None) return nest.none(), true;
    if (PyBool_Check(object)) return nest.boolean(object == Py_True), true;
    if (PyLong_CheckExact(object)) return encode_integer(object);
    if (PyFloat_CheckExact(object)) return nest.floating(PyFloat_AS_DOUBLE(object)), true;
    if (PyUnicode_CheckExact(object)) return encode_text(object);
    if (PyBytes_CheckExact(object)) return encode_bytes(object);
    if (depth + 1 >= wire::kNestDepthMax) return false;
    const bool is_list = PyList_CheckExact(object);
    if (is_list || PyTuple_CheckExact(object)) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
      if (count > 0 && !containers_.insert(object).second) return false;
      is_list ? nest.list(static_cast<uint32_t>(count)) : nest.tuple(static_cast<uint32_t>(count));
      for (Py_ssize_t index = 0; index < count; ++index) {
        if (!encode(PySequence_Fast_GET_ITEM(object, index), depth + 1)) return false;
      }
      return true;
    }
    if (!PyDict_CheckExact(object)) return encode_object(object, depth);
    if (!containers_.insert(object).second) return false;
    nest.dict(static_cast<uint32_t>(PyDict_GET_SIZE(object)));
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(object, &position, &key, &value) != 0) {
      if (is_exact_tensor(key) || !encode_key(key, depth + 1) || !encode(value, depth + 1)) return false;
    }
    return true;
  }

 private:
  bool encode_key(PyObject* key, uint32_t depth) {
    const bool was_in_key = std::exchange(is_in_key_, true);
    const bool is_encoded = encode(key, depth);
    is_in_key_ = was_in_key;
    return is_encoded;
  }

  bool encode_object(PyObject* object, uint32_t depth) {
    if (is_in_key_) return false;  // hashing it would run code of its class
    if (!containers_.insert(object).second) return false;
    const auto flat = flatten_object(object, true);
    if (!flat) return false;
    kept_.push_back(flat->values);
    result_.nest.object(flat->name, static_cast<uint32_t>(flat->values.size()));
    for (py::handle value : flat->values) {
      if (!encode(value.ptr(), depth + 1)) return false;
    }
    return true;
  }

  bool encode_tensor(PyObject* object, uint32_t depth) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    auto known = places_.find(tensor.unsafeGetTensorImpl());
    if (known == places_.end()) {
      if (has_components(tensor)) return depth + 1 < wire::kNestDepthMax && encode_object(object, depth);
      if (!worker::is_plain_tensor(tensor) || result_.tensors.size() >= wire::kTensorCountMax) return false;
      known = places_.emplace(tensor.unsafeGetTensorImpl(), static_cast<uint32_t>(result_.tensors.size())).first;
      result_.tensors.push_back(tensor);
    }
    result_.nest.tensor(known->second);
    return true;
  }

  bool encode_integer(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    result_.nest.integer(value);
    return true;
  }

  bool encode_text(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {  // lone surrogates; pickle can store them
      PyErr_Clear();
      return false;
    }
    result_.nest.text({text, static_cast<size_t>(size)});
    return true;
  }

  bool encode_bytes(PyObject* object) {
    result_.nest.bytes({PyBytes_AS_STRING(object), static_cast<size_t>(PyBytes_GET_SIZE(object))});
    return true;
  }

  EncodedNest& result_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> places_;
  std::unordered_set<PyObject*> containers_;
  bool is_in_key_ = false;
  std::vector<py::object> kept_;  // parts that were made here, so that no other object gets their addresses
};

// Makes the Python objects of a nest that check_nest has accepted.
class NestDecoder {
 public:
  NestDecoder(std::span<const std::byte> nest, const std::vector<at::Tensor>& tensors, const py::object& loads)
      : reader_(nest), tensors_(tensors), loads_(loads) {}

  py::object decode() {
    const NestToken token = unwrap(reader_.next());
    switch (token.tag) {
      case NestTag::kNone: return py::none();
      case NestTag::kFalse: return py::bool_(false);
      case NestTag::kTrue: return py::bool_(true);
      case NestTag::kInteger: return py::int_(token.integer);
      case NestTag::kFloat: return py::float_(token.floating);
      case NestTag::kText: return text(token.text);
      case NestTag::kBytes: return py::bytes(token.text.data(), token.text.size());
      case NestTag::kBigInteger: return big_integer(token.text);
      case NestTag::kScalar: return make_scalar(token.dtype, token.text);
      case NestTag::kTensor:
        if (is_in_key_) raise_malformed("a tensor is a key");
        return wrap_tensor(tensors_.at(token.count));
      case NestTag::kArray: return make_array(tensors_.at(token.count), token.dtype);
      case NestTag::kList: {
        py::list list(token.count);
        for (uint32_t index = 0; index < token.count; ++index) {
          PyList_SET_ITEM(list.ptr(), index, decode().release().ptr());
        }
        return list;
      }
      case NestTag::kTuple: return tuple(token.count);
      case NestTag::kNamedTuple:
        // As a key, its class would be asked for its hash, and the sender chooses the class.
        if (is_in_key_) raise_malformed("a named tuple is a key");
        return make_named_tuple(token.text, tuple(token.count));
      case NestTag::kObject: {
        if (is_in_key_) raise_malformed("an object is a key");
        const py::tuple values = tuple(token.count);
        return batch_types().make(text(token.text), values, !loads_.is_none());
      }
      case NestTag::kDict: return dict(token.count);
      case NestTag::kPickle: {
        PENSTOCK_ASSERT(!loads_.is_none(), "check_nest did not reject a pickle");
        py::list tensors;
        for (const at::Tensor& tensor : tensors_) tensors.append(wrap_tensor(tensor));
        return loads_(py::bytes(token.text.data(), token.text.size()), tensors);
      }
    }
    PENSTOCK_ASSERT(false, "the reader did not reject a tag");
  }

 private:
  [[noreturn]] static void raise_malformed(std::string_view reason) {
    raise_failure(wire::malformed("the nest of a batch", reason));
  }

  static py::object text(std::string_view text) {
    PyObject* const made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass");
    if (made != nullptr) return py::reinterpret_steal<py::object>(made);
    PyErr_Clear();
    raise_malformed("a text is not UTF-8");
  }

  static py::object big_integer(std::string_view digits) {
    const auto type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyLong_Type));
    return type.attr("from_bytes")(py::bytes(digits.data(), digits.size()), "little", py::arg("signed") = true);
  }

  py::tuple tuple(uint32_t count) {
    py::tuple tuple(count);
    for (uint32_t index = 0; index < count; ++index) {
      PyTuple_SET_ITEM(tuple.ptr(), index, decode().release().ptr());
    }
    return tuple;
  }

  // Keys with the same hash are compared with each other. Integers hash to their remainder modulo 2^61 - 1, so a sender
  // could choose a million with the same hash, and the interpreter lock would be held for hours.
  void count_hash(const py::object& key) {
    const Py_hash_t hash = PyObject_Hash(key.ptr());
    if (hash == -1 && PyErr_Occurred() != nullptr) return PyErr_Clear();  // the dict reports it
    if (++hash_counts_[hash] > kEqualHashesMax) raise_malformed("too many keys have the same hash");
  }

  py::dict dict(uint32_t count) {
    py::dict dict;
    auto outer_counts = std::exchange(hash_counts_, {});
    for (uint32_t index = 0; index < count; ++index) {
      const bool was_in_key = std::exchange(is_in_key_, true);
      const py::object key = decode();
      is_in_key_ = was_in_key;
      if (count > kEqualHashesMax) count_hash(key);
      const py::object value = decode();
      if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) == 0) continue;
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
      PyErr_Clear();
      raise_malformed("a key cannot be hashed");
    }
    hash_counts_ = std::move(outer_counts);
    return dict;
  }

  NestReader reader_;
  const std::vector<at::Tensor>& tensors_;
  const py::object& loads_;
  bool is_in_key_ = false;
  std::unordered_map<Py_hash_t, uint32_t> hash_counts_;  // of the dict that is being made
};

}  // namespace

EncodedNest encode_nest(py::handle object, const py::object& dumps) {
  EncodedNest result;
  if (NestEncoder(result).encode(object.ptr(), 0)) return result;
  result = {};
  const auto pickled = dumps(object).cast<py::tuple>();
  const auto bytes = pickled[0].cast<py::bytes>();
  for (py::handle tensor : pickled[1].cast<py::list>()) result.tensors.push_back(THPVariable_Unpack(tensor.ptr()));
  result.nest.pickle(static_cast<std::string_view>(bytes));
  return result;
}

py::object decode_nest(std::span<const std::byte> nest, const std::vector<at::Tensor>& tensors,
                       const py::object& loads) {
  return NestDecoder(nest, tensors, loads).decode();
}

bool has_components(const at::Tensor& tensor) { return tensor.layout() != at::kStrided || tensor.is_nested(); }

bool is_exact_tensor(PyObject* object) { return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass); }

py::object wrap_tensor(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

}  // namespace penstock::bindings
