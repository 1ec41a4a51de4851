// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_rows.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "bindings/python_nest.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

using Read = NumberKind::Read;

constexpr NumberKind of_numpy(at::ScalarType dtype, Read read) {
  return {.type = nullptr, .dtype = dtype, .read = read};
}

// torch.as_tensor of a list gives these types the dtypes of the same names.
constexpr std::pair<const char*, NumberKind> kNumpyKinds[] = {
    {"float64", of_numpy(at::kDouble, Read::kFloat)}, {"float32", of_numpy(at::kFloat, Read::kFloat)},
    {"int64", of_numpy(at::kLong, Read::kInteger)},   {"int32", of_numpy(at::kInt, Read::kInteger)},
    {"int16", of_numpy(at::kShort, Read::kInteger)},  {"int8", of_numpy(at::kChar, Read::kInteger)},
    {"uint8", of_numpy(at::kByte, Read::kInteger)},   {"bool_", of_numpy(at::kBool, Read::kTruth)}};

}  // namespace

std::optional<NumberKind> NumberKinds::find(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (type == &PyFloat_Type) return NumberKind{.type = type, .dtype = at::kDouble, .read = Read::kFloat};
  if (type == &PyLong_Type) return NumberKind{.type = type, .dtype = at::kLong, .read = Read::kInteger};
  if (type == &PyBool_Type) return NumberKind{.type = type, .dtype = at::kBool, .read = Read::kTruth};
  if (!std::string_view(type->tp_name).starts_with("numpy.")) return std::nullopt;
  if (of_numpy_.empty()) {
    const auto numpy = py::module_::import("numpy");
    for (auto [name, kind] : kNumpyKinds) {
      kind.type = reinterpret_cast<PyTypeObject*>(numpy.attr(name).ptr());  // numpy's types live as long as the process
      of_numpy_.push_back(kind);
    }
  }
  const auto found = std::ranges::find(of_numpy_, type, &NumberKind::type);
  return found == of_numpy_.end() ? std::nullopt : std::optional(*found);
}

bool read_number(const NumberKind& kind, PyObject* object, worker::Number& number) {
  if (Py_TYPE(object) != kind.type) return false;
  switch (kind.read) {
    case Read::kFloat: number.floating = PyFloat_AsDouble(object); break;
    case Read::kInteger: {
      int overflow = 0;
      number.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (overflow != 0) return false;
      break;
    }
    case Read::kTruth: number.integer = PyObject_IsTrue(object); break;
  }
  return true;
}

namespace {

constexpr size_t kTileRowCount = 32;

}  // namespace

PythonRows::PythonRows(NumberKinds& kinds, std::span<PyObject* const> first, size_t row_count, Columns columns,
                       bool takes_numbers)
    : row_count_(row_count), is_of_lists_(columns == Columns::kLists) {
  const auto size = static_cast<Py_ssize_t>(row_count);
  bool has_numbers = false;
  for (PyObject* entry : first) {
    Column column{.kind = takes_numbers ? kinds.find(entry) : std::nullopt, .objects = {}};
    has_numbers = has_numbers || column.kind;
    if (!column.kind) {
      PyObject* const objects = is_of_lists_ ? PyList_New(size) : PyTuple_New(size);
      if (objects == nullptr) throw py::error_already_set();
      column.objects = py::reinterpret_steal<py::object>(objects);
    }
    columns_.push_back(std::move(column));
  }
  if (!has_numbers) return;
  tile_.resize(kTileRowCount * columns_.size());
  numbers_.resize(row_count * columns_.size());
}

bool PythonRows::put(size_t column, PyObject* object) {
  const Column& its = columns_[column];
  if (its.kind) return read_number(*its.kind, object, tile_[tile_row_count_ * columns_.size() + column]);
  if (is_of_lists_) {
    PyList_SET_ITEM(its.objects.ptr(), static_cast<Py_ssize_t>(row_), Py_NewRef(object));
  } else {
    PyTuple_SET_ITEM(its.objects.ptr(), static_cast<Py_ssize_t>(row_), Py_NewRef(object));
  }
  return true;
}

void PythonRows::end_row() {
  ++row_;
  if (tile_.empty()) return;
  ++tile_row_count_;
  if (tile_row_count_ == kTileRowCount || row_ == row_count_) empty_tile();
}

void PythonRows::empty_tile() {
  const size_t first_row = row_ - tile_row_count_;
  for (size_t column = 0; column < columns_.size(); ++column) {
    if (!columns_[column].kind) continue;
    worker::Number* target = numbers_.data() + column * row_count_ + first_row;
    for (size_t row = 0; row < tile_row_count_; ++row) *target++ = tile_[row * columns_.size() + column];
  }
  tile_row_count_ = 0;
}

std::optional<at::ScalarType> PythonRows::dtype(size_t column) const {
  const auto& kind = columns_[column].kind;
  return kind ? std::optional(kind->dtype) : std::nullopt;
}

std::span<const worker::Number> PythonRows::numbers(size_t column) const {
  return std::span(numbers_).subspan(column * row_count_, row_count_);
}

py::object PythonSampleRows::fetch(py::handle dataset, py::handle index) {
  const Instant begun_at = clock_now();
  auto sample = py::reinterpret_steal<py::object>(PyObject_GetItem(dataset.ptr(), index.ptr()));
  if (!sample) throw py::error_already_set();
  const Instant fetched_at = clock_now();
  clock_.note_sample(fetched_at - begun_at);
  rows_.begin_sample();
  auto row = moved(sample.ptr());
  clock_.note_copy(clock_now() - fetched_at);
  return row ? row : sample;
}

// The replacement for `value`, which has one reference left; null if it stays. A container without other references is
// changed in place.
py::object PythonSampleRows::moved(PyObject* value) {
  if (Py_REFCNT(value) != 1) return {};
  if (is_exact_tensor(value)) {
    const at::Tensor row = rows_.take(THPVariable_Unpack(value));
    return row.defined() ? wrap_tensor(row) : py::object();
  }
  if (PyTuple_CheckExact(value)) {
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(value); ++place) {
      auto row = moved(PyTuple_GET_ITEM(value, place));
      if (row && PyTuple_SetItem(value, place, row.release().ptr()) != 0) throw py::error_already_set();
    }
  } else if (PyList_CheckExact(value)) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(value); ++place) {
      auto row = moved(PyList_GET_ITEM(value, place));
      if (row && PyList_SetItem(value, place, row.release().ptr()) != 0) throw py::error_already_set();
    }
  } else if (PyDict_CheckExact(value)) {
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    while (PyDict_Next(value, &position, &key, &item) != 0) {
      auto row = moved(item);
      // The key exists already: the dict keeps its order, and PyDict_Next()'s position stays valid.
      if (row && PyDict_SetItem(value, key, row.ptr()) != 0) throw py::error_already_set();
    }
  }
  return {};
}

}  // namespace penstock::bindings
