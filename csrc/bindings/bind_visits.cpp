// SPDX-License-Identifier: Apache-2.0
// Records of visits: their writer in a trainer, and the findings in a folder of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "visits/visit_file.h"
#include "visits/visit_history.h"

namespace py = pybind11;
using namespace py::literals;

namespace penstock::bindings {

using visits::Comparison;
using visits::EpochFacts;
using visits::Parting;
using visits::Place;
using visits::RankOfJob;
using visits::Session;
using visits::SessionFacts;
using visits::VisitFolder;
using visits::VisitRecorder;

namespace {

Session session_of(int64_t time_ns, std::string loader, std::string dataset, std::string sampler, std::string job,
                   int64_t dataset_size, int64_t samples_per_epoch, uint16_t flags) {
  return {.time_ns = time_ns,
          .dataset_size = dataset_size,
          .samples_per_epoch = samples_per_epoch,
          .flags = flags,
          .loader = std::move(loader),
          .dataset = std::move(dataset),
          .sampler = std::move(sampler),
          .job = std::move(job)};
}

// A recorder, and its sources.
struct PythonRecorder {
  std::unique_ptr<VisitRecorder> recorder;
  std::vector<int64_t> indices = {};
  py::object order = py::none();  // holds the memory
  const int64_t* order_data = nullptr;
  uint64_t order_count = 0;

  void set_order(const py::buffer& buffer) {
    const py::buffer_info info = buffer.request();
    if (info.itemsize != sizeof(int64_t) || info.ndim != 1 || info.strides[0] != sizeof(int64_t))
      throw py::type_error("an order must be a contiguous buffer of 64-bit integers");
    order = buffer;
    order_data = static_cast<const int64_t*>(info.ptr);
    order_count = static_cast<uint64_t>(info.size);
  }

  void append_order(uint32_t epoch, int64_t step, uint64_t first, uint64_t count) {
    if (first > order_count || count > order_count - first) throw py::index_error("a batch is not in the order");
    unwrap(recorder->append(epoch, step, {order_data + first, count}, 0));
  }

  // Returns whether the list has integers of 64 bits alone; it is recorded if so.
  bool append(uint32_t epoch, int64_t step, const py::list& list, uint16_t flags) {
    const auto count = static_cast<size_t>(PyList_GET_SIZE(list.ptr()));
    indices.resize(count);
    for (size_t place = 0; place < count; ++place) {
      PyObject* item = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(place));
      if (!PyLong_CheckExact(item)) return false;
      int overflow = 0;
      indices[place] = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow != 0) return false;
    }
    unwrap(recorder->append(epoch, step, indices, flags));
    return true;
  }
};

py::tuple to_plain(const Place& place) { return py::make_tuple(place.epoch, place.step); }

py::object to_plain(const std::optional<Place>& place) { return place ? py::object(to_plain(*place)) : py::none(); }

py::list to_plain(const std::vector<Place>& places) {
  py::list plain;
  for (const Place& place : places) plain.append(to_plain(place));
  return plain;
}

py::dict to_plain(const visits::OtherDataset& other) {
  return py::dict("place"_a = to_plain(other.place), "before"_a = other.before, "after"_a = other.after);
}

py::dict to_plain(const SessionFacts& facts) {
  return py::dict("time_ns"_a = facts.session.time_ns, "loader"_a = facts.session.loader,
                  "dataset"_a = facts.session.dataset, "dataset_size"_a = facts.session.dataset_size,
                  "sampler"_a = facts.session.sampler, "job"_a = facts.session.job, "world_size"_a = facts.world_size,
                  "ranks"_a = facts.ranks, "batches"_a = facts.batch_count, "samples"_a = facts.sample_count,
                  "first"_a = to_plain(facts.first), "last"_a = to_plain(facts.last),
                  "epoch_shift"_a = facts.epoch_shift, "step_shift"_a = facts.step_shift);
}

py::dict to_plain(const EpochFacts& facts) {
  py::list doubled;
  for (const auto& one : facts.doubled)
    doubled.append(py::dict("again"_a = to_plain(one.again), "first"_a = to_plain(one.first), "count"_a = one.count,
                            "is_whole_step"_a = one.is_whole_step, "samples"_a = one.samples));
  py::list missing_ranks;
  for (const auto& [place, rank] : facts.missing_ranks)
    missing_ranks.append(py::make_tuple(place.epoch, place.step, rank));
  return py::dict("epoch"_a = facts.epoch, "steps"_a = facts.step_count, "samples"_a = facts.sample_count,
                  "distinct"_a = facts.distinct_count, "unknown"_a = facts.unknown_count,
                  "has_ended"_a = facts.has_ended, "may_repeat"_a = facts.may_repeat, "has_keys"_a = facts.has_keys,
                  "doubled"_a = doubled, "doubled_samples"_a = facts.doubled_count,
                  "padding_samples"_a = facts.padding_count, "missing_samples"_a = facts.missing_count,
                  "left_out_samples"_a = facts.left_out_count, "missing"_a = facts.missing,
                  "missing_steps"_a = to_plain(facts.missing_steps), "missing_step_count"_a = facts.missing_step_count,
                  "missing_ranks"_a = missing_ranks, "missing_rank_count"_a = facts.missing_rank_count);
}

py::dict to_plain(const visits::Audit& audit) {
  py::list sessions, epochs, again, datasets, torn;
  for (const auto& one : audit.sessions) sessions.append(to_plain(one));
  for (const auto& one : audit.epochs) epochs.append(to_plain(one));
  for (const auto& one : audit.given_again)
    again.append(py::dict("session"_a = one.session, "earlier"_a = one.earlier, "first"_a = to_plain(one.first),
                          "last"_a = to_plain(one.last), "steps"_a = one.step_count,
                          "differs_from"_a = to_plain(one.differs_from)));
  for (const auto& one : audit.other_datasets) datasets.append(to_plain(one));
  for (const auto& one : audit.torn)
    torn.append(py::dict("path"_a = one.path, "offset"_a = one.offset, "bytes"_a = one.bytes,
                         "is_damaged_inside"_a = one.is_damaged_inside));
  return py::dict("sessions"_a = sessions, "epochs"_a = epochs, "given_again"_a = again, "other_datasets"_a = datasets,
                  "torn"_a = torn);
}

const char* name_of(Parting parting) {
  switch (parting) {
    case Parting::kNone: return "none";
    case Parting::kOrder: return "order";
    case Parting::kSamples: return "samples";
    case Parting::kStepMissing: return "step-missing";
    case Parting::kStepAdded: return "step-added";
    case Parting::kStepRepeated: return "step-repeated";
    case Parting::kStepsSwapped: return "steps-swapped";
  }
  return "none";
}

py::dict to_plain(const Comparison& found) {
  return py::dict("is_by_roots"_a = found.is_by_roots, "is_equal"_a = found.is_equal, "steps_a"_a = found.step_count_a,
                  "steps_b"_a = found.step_count_b, "parting"_a = name_of(found.parting),
                  "place_a"_a = to_plain(found.place_a), "place_b"_a = to_plain(found.place_b),
                  "other"_a = to_plain(found.other), "only_a"_a = found.only_a, "only_b"_a = found.only_b,
                  "only_a_count"_a = found.only_a_count, "only_b_count"_a = found.only_b_count,
                  "differing_steps"_a = found.differing_steps,
                  "dataset"_a = found.dataset ? py::object(to_plain(*found.dataset)) : py::none());
}

}  // namespace

void bind_visits(py::module_& module) {
  module.attr("VISIT_HASHED_KEYS") = visits::kHashedKeys;
  module.attr("VISIT_MAY_REPEAT") = visits::kMayRepeat;
  module.attr("VISIT_HAS_NO_PLACE") = visits::kHasNoPlace;
  module.attr("VISIT_SAME_PROCESS") = visits::kSameProcess;
  module.attr("VISIT_IN_ORDER") = visits::kInOrder;
  module.def(
      "visit_file_name",
      [](uint32_t rank, uint32_t world_size) { return visits::file_name({.rank = rank, .world_size = world_size}); },
      py::arg("rank"), py::arg("world_size"));
  py::class_<Session>(module, "VisitSession")
      .def(py::init(&session_of), py::kw_only(), py::arg("time_ns"), py::arg("loader"), py::arg("dataset"),
           py::arg("sampler"), py::arg("job"), py::arg("dataset_size"), py::arg("samples_per_epoch"), py::arg("flags"));
  py::class_<PythonRecorder>(module, "VisitRecorder")
      .def(
          py::init([](const std::string& path, uint32_t rank, uint32_t world_size, const Session& session) {
            return PythonRecorder{unwrap(VisitRecorder::open(path, {.rank = rank, .world_size = world_size}, session))};
          }),
          py::arg("path"), py::arg("rank"), py::arg("world_size"), py::arg("session"))
      .def("set_order", &PythonRecorder::set_order, py::arg("order"))
      .def("append_order", &PythonRecorder::append_order, py::arg("epoch"), py::arg("step"), py::arg("first"),
           py::arg("count"))
      .def("append", &PythonRecorder::append, py::arg("epoch"), py::arg("step"), py::arg("indices"),
           py::arg("flags") = 0)
      .def(
          "append_run",
          [](PythonRecorder& self, uint32_t epoch, int64_t step, int64_t first, uint32_t count) {
            unwrap(self.recorder->append_run(epoch, step, first, count));
          },
          py::arg("epoch"), py::arg("step"), py::arg("first"), py::arg("count"))
      .def(
          "append_unknown",
          [](PythonRecorder& self, uint32_t epoch, int64_t step, uint32_t count) {
            unwrap(self.recorder->append_unknown(epoch, step, count));
          },
          py::arg("epoch"), py::arg("step"), py::arg("count"))
      .def(
          "end_epoch",
          [](PythonRecorder& self, uint32_t epoch, int64_t steps) { unwrap(self.recorder->end_epoch(epoch, steps)); },
          py::arg("epoch"), py::arg("steps"))
      .def(
          "append_session",
          [](PythonRecorder& self, const Session& session) { unwrap(self.recorder->append_session(session)); },
          py::arg("session"))
      .def("close", [](PythonRecorder& self) { self.recorder->close(); })
      .def_property_readonly("repair", [](const PythonRecorder& self) { return self.recorder->repair(); })
      .def_property_readonly("last_epoch", [](const PythonRecorder& self) { return self.recorder->last_epoch(); })
      .def_property_readonly("has_last_ended",
                             [](const PythonRecorder& self) { return self.recorder->has_last_ended(); })
      .def_property_readonly("bytes", [](const PythonRecorder& self) { return self.recorder->bytes(); });
  py::class_<VisitFolder>(module, "VisitFolder")
      .def_static(
          "open",
          [](const std::string& folder) { return std::make_unique<VisitFolder>(unwrap(VisitFolder::open(folder))); },
          py::arg("folder"))
      .def("roots",
           [](VisitFolder& self) {
             auto roots = unwrap(without_gil([&] { return self.roots(); }));
             py::list plain;
             for (const auto& [rank, tree] : roots)
               plain.append(py::dict("rank"_a = rank.rank, "world_size"_a = rank.world_size,
                                     "batches"_a = tree.leaf_count, "root"_a = visits::hex_of(tree.root)));
             return plain;
           })
      .def("audit", [](VisitFolder& self) { return to_plain(unwrap(without_gil([&] { return self.audit(); }))); })
      .def_static(
          "compare",
          [](VisitFolder& a, VisitFolder& b) {
            return to_plain(unwrap(without_gil([&] { return VisitFolder::compare(a, b); })));
          },
          py::arg("a"), py::arg("b"));
}

}  // namespace penstock::bindings
