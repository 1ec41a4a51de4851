// SPDX-License-Identifier: Apache-2.0
#pragma once
// The samples of a batch, read row by row. PythonRows collects their entries in columns, with numbers of one NumberKind
// each; PythonSampleRows moves their tensors into the rows of the batch.

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "worker/stack.h"

namespace penstock::bindings {

// One type of numbers in samples, Python's or numpy's scalars, and the dtype that torch's default_collate gives to a
// column of them. A column is of this kind if the type of each of its numbers is exactly this type.
struct NumberKind {
  enum class Read { kFloat, kInteger, kTruth };

  PyTypeObject* type;
  at::ScalarType dtype;
  Read read;
};

// The kinds of the numbers that samples may contain. Confined to one call, under the interpreter lock.
class NumberKinds {
 public:
  // No value for other objects: instances of subclasses, and numpy's other scalars, too.
  std::optional<NumberKind> find(PyObject* object);

 private:
  std::vector<NumberKind> of_numpy_;  // looked up at the first numpy object
};

// Extracts the number from an object. Returns false if the object has another type, or is an integer of more than 64
// bits. Runs no user-defined code.
bool read_number(const NumberKind& kind, PyObject* object, worker::Number& number);

// The columns of a batch's samples, filled sample by sample: a sample's entries are close together in memory, a
// column's are not. Numbers are extracted immediately, so that each object is read only once; all other entries are
// kept as the list or tuple that torch's default_collate makes from a column. Confined to one call, under the
// interpreter lock. Runs no user-defined code.
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

// dataset[index], with the sample's tensors moved into their rows of the batch (worker/stack.h). A sample consists of
// exact tuples, lists, dicts and tensors; other parts stay as they are, as do objects with other references.
class PythonSampleRows {
 public:
  explicit PythonSampleRows(worker::SlabWriter& writer) : rows_(writer), clock_(writer.clock()) {}

  // Starts a batch of `sample_count` samples.
  void begin(size_t sample_count) { rows_.begin(sample_count); }

  // Returns dataset[index]. Raises the dataset's exceptions.
  pybind11::object fetch(pybind11::handle dataset, pybind11::handle index);

  // The batch is finished or abandoned. Returns whether samples had tensors that can be moved.
  bool end() { return rows_.end(); }

 private:
  pybind11::object moved(PyObject* value);

  worker::SampleRows rows_;
  dataset::FetchClock& clock_;
};

}  // namespace penstock::bindings
