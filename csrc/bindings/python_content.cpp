// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_content.h"

#include <pybind11/numpy.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>
#include <string_view>

#include "bindings/python_nest.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

// The cost of reading, rounded up (measured by bench/dataset_look.py).
constexpr double kObjectS = 20e-9;
constexpr double kByteS = 0.2e-9;
constexpr double kTensorS = 500e-9;  // also per array
constexpr double kMappingsS = 1.5e-3;
constexpr uint32_t kDepthMax = 64;
constexpr int kHasObjects = 0x01;  // NPY_ITEM_REFCOUNT, in a dtype's flags
constexpr std::string_view kPlainKinds = "biufcSUVmM";

// Distinguishes values of different types, and containers from their neighbours.
enum class Tag : uint64_t {
  kNone = 1,
  kEllipsis,
  kBoolean,
  kInteger,
  kFloat,
  kComplex,
  kText,
  kBytes,
  kByteArray,
  kList,
  kTuple,
  kDict,
  kSet,
  kTensor,
  kArray,
  kArrayScalar,
};

uint64_t address_of(const void* object) { return reinterpret_cast<uint64_t>(object); }

// The bytes from the first to the last element. The bytes between a view's elements belong to the memory's owner.
std::span<const std::byte> extent_of(const py::array& array) {
  if (array.size() == 0) return {};
  py::ssize_t before = 0;
  py::ssize_t behind = array.itemsize();
  for (py::ssize_t dim = 0; dim < array.ndim(); ++dim) {
    const py::ssize_t reach = (array.shape(dim) - 1) * array.strides(dim);
    (reach < 0 ? before : behind) += reach;
  }
  return {static_cast<const std::byte*>(array.data()) + before, static_cast<size_t>(behind - before)};
}

}  // namespace

PlainContent::PlainContent(double cost_s_max)
    : array_type_(py::module_::import("numpy").attr("ndarray")),
      array_scalar_type_(py::module_::import("numpy").attr("generic")),
      parameter_type_(py::module_::import("torch.nn").attr("Parameter")),
      cost_left_s_(cost_s_max) {}

std::optional<ContentDigest::Value> PlainContent::digest(py::handle value) {
  digest_ = {};
  PyObject* const object = value.ptr();
  const bool is_container = PyList_Check(object) || PyTuple_Check(object) || PyDict_Check(object);
  const bool is_taken = is_container && !PyODict_Check(object) ? take_container(object, 0)
                        : py::isinstance(object, array_type_)  ? take_array(object)
                                                               : take(object, 0);
  return is_taken && !is_opaque_ ? std::optional(digest_.value()) : std::nullopt;
}

void PlainContent::spend(double cost_s) {
  cost_left_s_ -= cost_s;
  if (cost_left_s_ < 0) is_opaque_ = true;
}

bool PlainContent::refuse() {
  is_opaque_ = true;
  return false;
}

bool PlainContent::is_type(PyObject* object, const py::object& type) const {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
}

bool PlainContent::take(PyObject* object, uint32_t depth) {
  spend(kObjectS);
  if (is_opaque_) return false;
  if (depth == kDepthMax) return refuse();
  if (PyUnicode_CheckExact(object)) return take_text(object);
  if (PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyBool_Check(object) || PyComplex_CheckExact(object))
    return take_number(object);
  if (object == Py_None || object == Py_Ellipsis) {
    digest_.add(static_cast<uint64_t>(object == Py_None ? Tag::kNone : Tag::kEllipsis));
    return true;
  }
  if (PyBytes_CheckExact(object)) {
    digest_.add(static_cast<uint64_t>(Tag::kBytes));
    return take_bytes(std::as_bytes(std::span(PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object))));
  }
  if (PyByteArray_CheckExact(object)) {
    digest_.add(static_cast<uint64_t>(Tag::kByteArray));
    digest_.add(address_of(object));
    return take_bytes(std::as_bytes(std::span(PyByteArray_AS_STRING(object), PyByteArray_GET_SIZE(object))));
  }
  // A tuple whose class has no instance attributes, such as a named tuple, consists only of its items.
  const bool is_tuple = PyTuple_Check(object) && Py_TYPE(object)->tp_dictoffset == 0;
  if (is_tuple || PyList_CheckExact(object) || PyDict_CheckExact(object)) return take_container(object, depth);
  if (PyAnySet_CheckExact(object)) return take_set(object, depth);
  if (is_exact_tensor(object) || is_type(object, parameter_type_)) return take_tensor(object, depth);
  if (is_type(object, array_type_)) return take_array(object);
  if (PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(array_scalar_type_.ptr())))
    return take_array_scalar(object);
  return false;
}

bool PlainContent::take_number(PyObject* object) {
  if (PyFloat_CheckExact(object)) {
    digest_.add(static_cast<uint64_t>(Tag::kFloat));
    digest_.add(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(object)));
    return true;
  }
  if (PyComplex_CheckExact(object)) {
    digest_.add(static_cast<uint64_t>(Tag::kComplex));
    digest_.add(std::bit_cast<uint64_t>(PyComplex_RealAsDouble(object)));
    digest_.add(std::bit_cast<uint64_t>(PyComplex_ImagAsDouble(object)));
    return true;
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return false;
  digest_.add(static_cast<uint64_t>(PyBool_Check(object) ? Tag::kBoolean : Tag::kInteger));
  digest_.add(static_cast<uint64_t>(value));
  return true;
}

bool PlainContent::take_text(PyObject* object) {
  const int character_bytes = PyUnicode_KIND(object);
  digest_.add(static_cast<uint64_t>(Tag::kText));
  digest_.add(static_cast<uint64_t>(character_bytes));
  const auto bytes = static_cast<size_t>(PyUnicode_GET_LENGTH(object) * character_bytes);
  return take_bytes({static_cast<const std::byte*>(PyUnicode_DATA(object)), bytes});
}

bool PlainContent::take_container(PyObject* object, uint32_t depth) {
  const bool is_tuple = PyTuple_Check(object);
  digest_.add(static_cast<uint64_t>(PyDict_Check(object) ? Tag::kDict : is_tuple ? Tag::kTuple : Tag::kList));
  digest_.add(address_of(Py_TYPE(object)));
  // Replacing a list by an equal one is a change for every object that still holds the first.
  if (!is_tuple) digest_.add(address_of(object));
  if (PyDict_Check(object)) {
    digest_.add(static_cast<uint64_t>(PyDict_GET_SIZE(object)));
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(object, &position, &key, &value) != 0) {
      if (!take(key, depth + 1) || !take(value, depth + 1)) return false;
    }
    return true;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  digest_.add(static_cast<uint64_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    if (!take(PySequence_Fast_GET_ITEM(object, index), depth + 1)) return false;
  }
  return true;
}

bool PlainContent::take_set(PyObject* object, uint32_t depth) {
  digest_.add(static_cast<uint64_t>(Tag::kSet));
  digest_.add(address_of(object));
  digest_.add(static_cast<uint64_t>(PySet_GET_SIZE(object)));
  for (const py::handle& item : py::reinterpret_borrow<py::object>(object)) {
    if (!take(item.ptr(), depth + 1)) return false;
  }
  return true;
}

bool PlainContent::take_tensor(PyObject* object, uint32_t depth) {
  spend(kTensorS);
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool has_memory = tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
                          !tensor.is_quantized() && !tensor.grad().defined();
  if (!has_memory) return refuse();
  // The caller itself checks the attributes of the value that it passed.
  if (depth > 0 && py::len(py::handle(object).attr("__dict__")) > 0) return false;
  digest_.add(static_cast<uint64_t>(Tag::kTensor));
  digest_.add(address_of(object));
  digest_.add(static_cast<uint64_t>(tensor.scalar_type()));
  digest_.add(static_cast<uint64_t>(tensor.storage_offset()));
  digest_.add(std::as_bytes(std::span(tensor.sizes().data(), tensor.sizes().size())));
  digest_.add(std::as_bytes(std::span(tensor.strides().data(), tensor.strides().size())));
  const at::Storage& storage = tensor.storage();
  return take_memory({static_cast<const std::byte*>(storage.data()), storage.nbytes()});
}

bool PlainContent::take_array(PyObject* object) {
  spend(kTensorS);
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype dtype = array.dtype();
  if (kPlainKinds.find(dtype.kind()) == std::string_view::npos || (dtype.flags() & kHasObjects) != 0) return refuse();
  digest_.add(static_cast<uint64_t>(Tag::kArray));
  digest_.add(address_of(object));
  digest_.add(address_of(dtype.ptr()));
  digest_.add(std::as_bytes(std::span(array.shape(), array.ndim())));
  digest_.add(std::as_bytes(std::span(array.strides(), array.ndim())));
  const auto memory = extent_of(array);
  if (!array.owndata()) return take_memory(memory);
  digest_.add(address_of(memory.data()));
  return take_bytes(memory);
}

bool PlainContent::take_array_scalar(PyObject* object) {
  const auto scalar = py::reinterpret_borrow<py::object>(object);
  const py::dtype dtype = scalar.attr("dtype");
  // A structured scalar is a writable view.
  if (dtype.kind() == 'V' || kPlainKinds.find(dtype.kind()) == std::string_view::npos) return false;
  digest_.add(static_cast<uint64_t>(Tag::kArrayScalar));
  digest_.add(address_of(Py_TYPE(object)));
  const auto bytes = scalar.attr("tobytes")().cast<std::string_view>();
  return take_bytes(std::as_bytes(std::span(bytes)));
}

bool PlainContent::take_memory(std::span<const std::byte> memory) {
  if (!memory_) {
    spend(kMappingsS);
    auto read = worker::ProcessMemory::read();
    if (!read) return refuse();
    memory_ = std::move(read).value();
  }
  digest_.add(address_of(memory.data()));
  switch (memory_->kind_of(memory)) {
    case worker::MemoryKind::kOwn: return take_bytes(memory);
    case worker::MemoryKind::kReadOnly: digest_.add(memory.size()); return true;
    case worker::MemoryKind::kShared:
    case worker::MemoryKind::kUnknown: break;
  }
  return refuse();
}

bool PlainContent::take_bytes(std::span<const std::byte> bytes) {
  spend(kByteS * static_cast<double>(bytes.size()));
  if (is_opaque_) return false;
  digest_.add(bytes);
  return true;
}

}  // namespace penstock::bindings
