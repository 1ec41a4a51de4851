// SPDX-License-Identifier: Apache-2.0
#pragma once
// dataset[index] with the sample's tensors moved into their rows of the batch (worker/sample_rows.h). A sample is
// exact tuples, lists, dicts and tensors; whatever else it has stays as it is, and so does what anybody else holds.

#include <pybind11/pybind11.h>

#include "worker/sample_rows.h"

namespace penstock::bindings {

class PythonSampleRows {
 public:
  explicit PythonSampleRows(worker::SlabWriter& writer) : rows_(writer), clock_(writer.clock()) {}

  // A batch of so many samples begins.
  void begin(size_t sample_count) { rows_.begin(sample_count); }

  // dataset[index]. Raises what the dataset raises.
  pybind11::object fetch(pybind11::handle dataset, pybind11::handle index);

  // The batch is made, or given up. Whether samples had tensors that can be moved.
  bool end() { return rows_.end(); }

 private:
  pybind11::object moved(PyObject* value);

  worker::SampleRows rows_;
  dataset::FetchClock& clock_;
};

}  // namespace penstock::bindings
