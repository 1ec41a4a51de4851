// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_rows.h"

#include <algorithm>

namespace py = pybind11;

namespace penstock::bindings {
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

}  // namespace penstock::bindings
