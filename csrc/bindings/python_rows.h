// SPDX-License-Identifier: Apache-2.0
#pragma once
// The columns of a batch's samples, filled sample by sample: a sample's entries are close together in memory, a
// column's are not. Numbers are extracted immediately, so that each object is read only once; all other entries are
// kept as the list or tuple that torch's default_collate makes from a column.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "bindings/python_numbers.h"

namespace penstock::bindings {

// Confined to one call, under the interpreter lock. Runs no user-defined code.
class PythonRows {
 public:
  enum class Columns { kLists, kTuples };

  // For `row_count` samples with the structure of the first one, whose entries are `first`. Without `takes_numbers`,
  // numbers are kept as objects like all other entries.
  PythonRows(NumberKinds& kinds, std::span<PyObject* const> first, size_t row_count, Columns columns,
             bool takes_numbers);

  size_t column_count() const { return columns_.size(); }

  // Sets the current row's entry in one column. Returns false if the column is numeric and this is not a number of its
  // kind: discard these rows then.
  bool put(size_t column, PyObject* object);
  // Completes the current row and starts the next one.
  void end_row();

  // Call after the last row. The dtype of a numeric column; no value for a column of objects.
  std::optional<at::ScalarType> dtype(size_t column) const;
  std::span<const worker::Number> numbers(size_t column) const;
  const pybind11::object& objects(size_t column) const { return columns_[column].objects; }

 private:
  struct Column {
    std::optional<NumberKind> kind;
    pybind11::object objects;
  };

  void empty_tile();

  size_t row_count_;
  bool is_of_lists_;
  std::vector<Column> columns_;
  // The most recent rows, row by row. Columns are far apart in memory, often by a power of two, so the entries of a row
  // written directly to all columns would compete for one cache set.
  std::vector<worker::Number> tile_;
  std::vector<worker::Number> numbers_;  // column by column
  size_t row_ = 0;
  size_t tile_row_count_ = 0;
};

}  // namespace penstock::bindings
