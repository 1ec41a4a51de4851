// SPDX-License-Identifier: Apache-2.0
#pragma once
// dataset[index], with the sample's tensors moved into their rows of the batch (worker/sample_rows.h). A sample
// consists of exact tuples, lists, dicts and tensors; other parts stay as they are, as do objects with other
// references.

#include <pybind11/pybind11.h>

#include "worker/sample_rows.h"

namespace penstock::bindings {

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
