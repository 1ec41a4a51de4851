// SPDX-License-Identifier: Apache-2.0
#pragma once
// Native parts of torch's fetchers: torch's default_collate, written directly into the slab, and a dataset and a
// collate_fn that report their times to a clock.

#include <pybind11/pybind11.h>

#include "dataset/fetch_clock.h"
#include "worker/slab_writer.h"

namespace penstock::bindings {

// Returns torch's default_collate of the samples, written directly into the slab if the result is the same object tree:
// exact dicts, tuples and lists of exact tensors, floats, integers, booleans, text, bytes, and numpy arrays and
// scalars. All other columns are passed to torch's default_collate, which also raises its errors. `samples` is a list
// of at least one sample; `default_collate` is torch's.
pybind11::object collate(worker::SlabWriter& writer, const pybind11::list& samples,
                         const pybind11::object& default_collate);

// A dataset that reports its times to a clock (dataset/fetch_clock.h). It replaces the user's in torch's fetchers, and
// is native so that tracebacks contain no frames of it. Confined to the thread of the clock.
class TimedSamples {
 public:
  TimedSamples(pybind11::object dataset, dataset::FetchClock& clock) : dataset_(std::move(dataset)), clock_(clock) {}

  // Returns dataset[index]. Raises the dataset's exceptions.
  pybind11::object get(pybind11::handle index);

  // The held object, for Python's garbage collector: it may reference, directly or not, the fetcher that holds this
  // object.
  pybind11::object& held() { return dataset_; }

 private:
  pybind11::object dataset_;
  dataset::FetchClock& clock_;
};

// The same for a collate_fn.
class TimedCollate {
 public:
  TimedCollate(pybind11::object collate_fn, dataset::FetchClock& clock, bool draws_nothing)
      : collate_fn_(std::move(collate_fn)), clock_(clock), draws_nothing_(draws_nothing) {}

  // Returns collate_fn(samples).
  pybind11::object call(pybind11::handle samples);
  bool draws_nothing() const { return draws_nothing_; }

  // As above.
  pybind11::object& held() { return collate_fn_; }

 private:
  pybind11::object collate_fn_;
  dataset::FetchClock& clock_;
  bool draws_nothing_;
};

void bind_timed_fetch(pybind11::module_& module);

}  // namespace penstock::bindings
