// SPDX-License-Identifier: Apache-2.0
#pragma once
// The columns of the samples of a batch, filled one sample after the other: what a sample has lies together in memory,
// and what a column has does not. Numbers are taken out at once, so that their objects are looked at once; everything
// else is kept as the list or the tuple that torch's default_collate makes of a column.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "bindings/python_numbers.h"

namespace penstock::bindings {

// Confined to one call, under the interpreter's lock. Runs no code of the user's.
class PythonRows {
 public:
  enum class Columns { kLists, kTuples };

  // Of `row_count` samples that are like the first, whose entries are `first`. Without `takes_numbers` numbers are
  // objects like all others.
  PythonRows(NumberKinds& kinds, std::span<PyObject* const> first, size_t row_count, Columns columns,
             bool takes_numbers);

  size_t column_count() const { return columns_.size(); }

  // The entry of the current row in one column. False where the column is of numbers and this is no such number: these
  // rows are of no use then.
  bool put(size_t column, PyObject* object);
  // The current row is complete, and the next one begins.
  void end_row();

  // After the last row. The dtype of a column of numbers; nothing for one of objects.
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
  // The last rows, one after the other. Columns lie far apart, often by a power of two, so that a row that were written
  // to all of them at once would have its places in one set of the caches.
  std::vector<worker::Number> tile_;
  std::vector<worker::Number> numbers_;  // one column after the other
  size_t row_ = 0;
  size_t tile_row_count_ = 0;
};

}  // namespace penstock::bindings
