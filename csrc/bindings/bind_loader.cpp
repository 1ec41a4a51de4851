// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <limits>

#include "base/clock.h"
#include "bindings/profiler_range.h"
#include "bindings/python_bytes.h"
#include "bindings/python_nest.h"
#include "bindings/python_requests.h"
#include "bindings/raise.h"
#include "device/accelerator_device.h"
#include "loader/client.h"
#include "loader/stream.h"
#include "wire/message.h"

namespace py = pybind11;

namespace penstock::bindings {

using loader::Batch;
using loader::BatchRecord;
using loader::BatchTensors;
using loader::Client;
using loader::EpochProgress;
using loader::StepLedger;
using loader::Stream;
using std::chrono::steady_clock;

namespace {

constexpr double kNoLink = std::numeric_limits<double>::infinity();  // bytes per second, within one machine
constexpr auto kWaitSlice = std::chrono::milliseconds(50);           // the maximum delay until a wait notices Ctrl-C

// Sleeps without the interpreter lock until an event arrives, and handles signals meanwhile. Returns false at the
// deadline.
bool wait_for_arrival(Client& client, steady_clock::time_point deadline) {
  for (;;) {
    const auto slice = std::min(deadline, steady_clock::now() + kWaitSlice);
    const bool has_arrived = without_gil([&] {
      const bool has_come = client.wait_until(slice);
      stay_if_python_exits();
      return has_come;
    });
    if (has_arrived) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (steady_clock::now() >= deadline) return false;
  }
}

// Replaces leaves that were left out by Python objects: `stand_in` is called with a meta tensor.
void put_stand_ins(Batch& batch, const py::object& stand_in) {
  for (size_t index = 0; index < batch.record().frame().leaf_count(); ++index) {
    if (!batch.record().is_withheld(index)) continue;
    const py::object object = stand_in(wrap_tensor(batch.tensors().all()[index]));
    batch.tensors().set_stand_in(index, THPVariable_Unpack(object.ptr()));
  }
}

// The trainer's view of a batch apart from its value: its leaves in table order, its boundary tensors by key, its
// request number, the origin for fetching leaves that were left out, if any, and the worker that made it.
py::tuple describe_leaves(Batch& batch) {
  const auto& tensors = batch.tensors().all();
  const size_t leaf_count = batch.record().frame().leaf_count();
  py::list leaves;
  py::dict boundary;
  for (size_t index = 0; index < tensors.size(); ++index) {
    if (index < leaf_count) {
      leaves.append(wrap_tensor(tensors[index]));
    } else {
      boundary[py::str(std::string(batch.record().frame().boundary_keys[index - leaf_count]))] =
          wrap_tensor(tensors[index]);
    }
  }
  const auto& origin = batch.record().origin();
  return py::make_tuple(leaves, boundary, wire::number_of({.epoch = 0, .sequence = batch.record().facts().sequence}),
                        origin ? py::cast(*origin) : py::none(), batch.record().times().worker_id,
                        batch.ahead() ? py::cast(batch.ahead()) : py::none());
}

// Creates the exception that takes the place of a pool's batch.
py::object to_python(const BatchRecord::RemoteError& remote) {
  const auto make_error = py::module_::import("penstock.pool.worker_errors").attr("make_error");
  const std::string where = remote.worker.empty() ? "" : "in penstock worker " + remote.worker;
  return make_error(remote.type_name, remote.text, where);
}

// The error of a batch that cannot be rebuilt here, which names the pool's worker that sent the batch.
py::object name_sender(const py::object& error, const Batch& batch) {
  if (batch.record().sender().empty()) return error;
  return py::module_::import("penstock.pool.worker_errors").attr("name_sender")(error, batch.record().sender());
}

// Makes Python find or create the storages of shared-memory files, as torch does for files sent through a queue: a file
// that this process has already mapped shares one storage.
void open_shared_files(Batch& batch, const py::object& open_storage) {
  for (BatchTensors::SharedFile& file : batch.tensors().shared_files()) {
    if (!file.storage) file.storage = THPStorage_Unpack(open_storage(file.fd.release(), file.bytes).ptr());
  }
}

// An event in its Python form: its kind, value and value details, and its shard and the shard's state. If a batch
// cannot be rebuilt here, this is recorded, and its error is raised instead. The leaves are described if there is a
// `stand_in`. `is_divided`: leaves of other ranks stay meta tensors.
py::tuple to_python(Client::Event& event, Batch* of_event, const py::object& loads, const py::object& open_storage,
                    const py::object& stand_in, bool is_divided) {
  const int kind = static_cast<int>(event.kind);
  if (event.kind == Client::Event::Kind::kFailed) raise_failure(*event.error);
  if (event.kind == Client::Event::Kind::kNews)
    return py::make_tuple(kind, event.error->message, py::none(), event.shard_id, py::none());
  if (event.kind != Client::Event::Kind::kBatch) {
    return py::make_tuple(kind, event.worker_id, event.is_worker_done, event.shard_id, py::none());
  }
  const ProfilerRange range("penstock: unpack");
  Batch& batch = *of_event;
  py::object state = py::none();
  if (!batch.record().state().empty())
    state = py::bytes(reinterpret_cast<const char*>(batch.record().state().data()), batch.record().state().size());
  if (const auto& remote = batch.record().remote_error()) {
    return py::make_tuple(kind, to_python(*remote), py::bool_(false), event.shard_id, std::move(state));
  }
  py::object value;
  try {
    if (!is_divided && batch.record().withheld_bytes() > 0 && (stand_in.is_none() || !batch.record().origin()))
      raise_failure({Errc::kMalformed, "a worker omitted tensors of a batch without permission"});
    open_shared_files(batch, open_storage);
    if (!is_divided && !stand_in.is_none()) put_stand_ins(batch, stand_in);
    value = decode_nest(batch.record().frame().nest, batch.tensors().all(), loads);
  } catch (py::error_already_set& error) {
    event.is_unreadable = true;
    return py::make_tuple(kind, name_sender(error.value(), batch), py::bool_(false), event.shard_id, std::move(state));
  }
  py::object extra = py::none();
  if (batch.record().raises()) {
    extra = py::bool_(true);
  } else if (!stand_in.is_none()) {
    extra = describe_leaves(batch);
  }
  if (!batch.record().has_state())
    return py::make_tuple(kind, std::move(value), std::move(extra), event.shard_id, std::move(state));
  const auto pair = value.cast<py::tuple>();
  return py::make_tuple(kind, pair[0], std::move(extra), event.shard_id, pair[1]);
}

// A user-defined sampler: `pull` returns the indices of the next batch and the position of its first sample in the
// epoch's order, or raises StopIteration; `dumps` pickles indices that are not plain integers.
class PulledIndices : public loader::IndexSource {
 public:
  PulledIndices(py::function pull, py::function dumps) : pull_(std::move(pull)), dumps_(std::move(dumps)) {}

  std::optional<Indices> next() override {
    py::object index;
    uint64_t first_place = 0;
    try {
      const auto pulled = pull_().cast<py::tuple>();
      index = pulled[0];
      first_place = pulled[1].cast<uint64_t>();
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_StopIteration)) return std::nullopt;
      throw;
    }
    using wire::IndexKind;
    if (PyList_CheckExact(index.ptr()) && read_integers(py::reinterpret_borrow<py::list>(index)))
      return Indices{
          .kind = IndexKind::kIntegers, .body = std::as_bytes(std::span(integers_)), .first_place = first_place};
    if (PyLong_CheckExact(index.ptr())) {
      int overflow = 0;
      integers_.assign(1, PyLong_AsLongLongAndOverflow(index.ptr(), &overflow));
      if (overflow == 0)
        return Indices{
            .kind = IndexKind::kInteger, .body = std::as_bytes(std::span(integers_)), .first_place = first_place};
    }
    pickled_ = dumps_(index).cast<py::bytes>();
    return Indices{.kind = IndexKind::kPickle, .body = bytes_of(pickled_), .first_place = first_place};
  }

 private:
  bool read_integers(const py::list& index) {
    integers_.clear();
    integers_.reserve(index.size());
    for (py::handle item : index) {
      int overflow = 0;
      if (!PyLong_CheckExact(item.ptr())) return false;
      integers_.push_back(PyLong_AsLongLongAndOverflow(item.ptr(), &overflow));
      if (overflow != 0) return false;
    }
    return true;
  }

  py::function pull_;
  py::function dumps_;
  std::vector<int64_t> integers_;
  py::bytes pickled_;
};

loader::EpochPlan plan_of(int64_t base_seed, int64_t epoch, bool by_sample, std::shared_ptr<EpochProgress> progress) {
  return {.seeds = {.base_seed = base_seed, .epoch = epoch, .by_sample = by_sample}, .progress = std::move(progress)};
}

// Waits for the next event that `take` finds, and handles signals meanwhile; kNothing after `timeout_s`.
template <typename Take>
Client::Event take_or_wait(Stream& stream, double timeout_s, const Take& take) {
  // Trying first with the lock held saves a whole switch interval if another Python thread is computing.
  Client::Event event = take();
  if (event.kind != Client::Event::Kind::kNothing) return event;
  const ProfilerRange range("penstock: wait");
  const auto wait = std::chrono::duration<double>(std::min(timeout_s, 1e6));
  const auto deadline = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(wait);
  while (event.kind == Client::Event::Kind::kNothing && wait_for_arrival(stream.client(), deadline)) event = take();
  return event;
}

py::tuple next(Stream& stream, double timeout_s, const py::object& loads, const py::object& open_storage,
               const py::object& stand_in) {
  auto event = take_or_wait(stream, timeout_s, [&] { return stream.try_next(); });
  const bool is_divided = stream.client().has_leaves_by_rank();
  auto given = to_python(event, event.batch.get(), loads, open_storage, stand_in, is_divided);
  if (event.is_unreadable) stream.progress()->note_error();
  return given;
}

py::tuple look_ahead(Stream& stream, uint32_t batch_count, double timeout_s, const py::object& loads,
                     const py::object& open_storage, const py::object& stand_in) {
  auto event = take_or_wait(stream, timeout_s, [&] { return stream.try_look_ahead(batch_count); });
  const bool is_divided = stream.client().has_leaves_by_rank();
  if (event.kind != Client::Event::Kind::kBatch)
    return to_python(event, nullptr, loads, open_storage, stand_in, is_divided);
  Client::Event& waiting = stream.last_ahead();
  return to_python(waiting, waiting.batch.get(), loads, open_storage, stand_in, is_divided);
}

py::object bytes_or_none(const EpochProgress::State& state) {
  if (state.empty()) return py::none();
  return py::bytes(reinterpret_cast<const char*>(state.data()), state.size());
}

double seconds(uint64_t time_ns) { return static_cast<double>(time_ns) * 1e-9; }
double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

// For each worker, by its number or, in a pool, its identity: its batch count, and the seconds for samples, for
// collation, for prefixes, on the wire, and that the trainer waited for its batches.
py::dict workers_of(Stream& stream) {
  py::dict result;
  for (const auto& [worker_id, worker] : stream.client().ledger().workers()) {
    result[py::int_(worker_id)] =
        py::make_tuple(worker.batch_count, seconds(worker.making.dataset), seconds(worker.making.collate),
                       seconds(worker.making.prefix), seconds(worker.on_wire), seconds(worker.waited));
  }
  return result;
}

py::list slow_samples_of(Stream& stream) {
  py::list result;
  for (const loader::SlowSample& sample : stream.client().ledger().slow_samples())
    result.append(py::make_tuple(seconds(sample.time), sample.index, sample.epoch, sample.sequence, sample.place,
                                 sample.worker_id));
  return result;
}

// Instants are in seconds on the clock of time.monotonic().
py::list step_records_of(Stream& stream) {
  const auto at = [](Instant instant) { return seconds(instant.time_since_epoch()); };
  py::list result;
  for (const loader::StepRecord& record : stream.client().ledger().take_records()) {
    py::dict step;
    step["epoch"] = record.epoch;
    step["sequence"] = record.sequence;
    step["worker"] = record.times.worker_id;
    step["bytes"] = record.bytes;
    step["asked_at"] = at(record.times.asked_at);
    step["made_at"] = at(record.times.made_at);
    step["arrived_at"] = at(record.times.arrived_at);
    step["staged_at"] = at(record.times.staged_at);
    step["entered_at"] = at(record.entered_at);
    step["given_at"] = at(record.given_at);
    step["dataset_s"] = seconds(record.making.dataset);
    step["collate_s"] = seconds(record.making.collate);
    step["prefix_s"] = seconds(record.making.prefix);
    result.append(step);
  }
  return result;
}

// The counters since the client started. A batch that lookahead holds back counts as ready, not as delivered.
py::dict counters_of(Stream& stream) {
  const Client& client = stream.client();
  const auto& counters = client.counters();
  py::dict result;
  result["batches"] = counters.batches.value();
  result["batch_bytes"] = counters.batch_bytes.value();
  result["copied_batches"] = counters.copied_batches.value();
  result["inline_batches"] = counters.inline_batches.value();
  result["stale_batches"] = counters.stale_batches.value() + stream.dropped_ahead_count();
  result["early_batches"] = counters.early_batches.value();
  result["boundary_batches"] = counters.boundary_batches.value();
  result["compiled_batches"] = counters.compiled_batches.value();
  result["unrepeatable_batches"] = counters.unrepeatable_batches.value();
  result["withheld_bytes"] = counters.withheld_bytes.value();
  result["recalled_batches"] = counters.recalled_batches.value();
  result["device_widened_batches"] = counters.device_widened_batches.value();
  result["arenas"] = counters.arenas.value();
  result["waits"] = counters.waits.value();
  result["wait_s"] = static_cast<double>(counters.wait_ns.value()) * 1e-9;
  result["fetch_s"] = static_cast<double>(counters.fetch_ns.value()) * 1e-9;
  result["prefix_s"] = static_cast<double>(counters.prefix_ns.value()) * 1e-9;
  result["dataset_s"] = seconds(counters.dataset_ns.value());
  result["collate_s"] = seconds(counters.collate_ns.value());
  result["wire_s"] = seconds(counters.wire_ns.value());
  const wire::StepTotals steps = StepLedger::totals(counters);
  result["steps"] = steps.step_count;
  result["step_compute_s"] = seconds(steps.compute_ns);
  result["step_dataset_s"] = seconds(steps.dataset_ns);
  result["step_collate_s"] = seconds(steps.collate_ns);
  result["step_prefix_s"] = seconds(steps.prefix_ns);
  result["step_worker_s"] = seconds(steps.worker_ns);
  result["step_wire_s"] = seconds(steps.wire_ns);
  result["step_device_s"] = seconds(steps.device_ns);
  result["step_order_s"] = seconds(steps.order_ns);
  result["step_ranks_s"] = seconds(steps.ranks_ns);
  result["step_loader_s"] = seconds(steps.loader_ns);
  result["epochs_s"] = std::chrono::duration<double>(stream.epochs_time()).count();
  const wire::JobCosts costs = client.costs();
  result["pool_tenancies"] = costs.tenancy_count;
  result["pool_metered_tenancies"] = costs.metered_tenancy_count;
  result["pool_samples"] = costs.sample_count;
  result["pool_bytes"] = costs.batch_bytes;
  result["pool_worker_s"] = static_cast<double>(costs.served_ns) * 1e-9;
  result["pool_cpu_s"] = static_cast<double>(costs.cpu_ns) * 1e-9;
  result["pool_metered_energy_j"] = static_cast<double>(costs.energy_uj) * 1e-6;
  result["outstanding"] = client.outstanding_count();
  result["ready"] = stream.ready_count();
  return result;
}

// The few counters that are read for every batch: creating a tuple is several times faster than a dict of all counters.
py::tuple load_counters_of(Stream& stream) {
  const auto& counters = stream.client().counters();
  const auto link = stream.client().link();
  return py::make_tuple(counters.batches.value(), counters.boundary_batches.value(),
                        static_cast<double>(counters.fetch_ns.value()) * 1e-9,
                        static_cast<double>(counters.prefix_ns.value()) * 1e-9, counters.batch_bytes.value(),
                        link ? stream.client().worker_count() : 0U, link ? link->bytes_per_s : kNoLink);
}

// The leaves and boundary tensors of a recalled batch, in the form of describe_leaves(); None if it did not arrive in
// time. Raises the dataset's error if the batch could not be made again.
py::object recalled(Client& client, const BatchRecord::Origin& origin, double timeout_s) {
  const auto deadline = steady_clock::now() + duration_of(timeout_s);
  for (;;) {
    const auto slice = std::min(deadline, steady_clock::now() + kWaitSlice);
    auto taken = without_gil([&] {
      auto batch = client.recalled(origin, slice);
      stay_if_python_exits();
      return batch;
    });
    if (taken) {
      Batch& batch = *taken.value();
      if (const auto& remote = batch.record().remote_error()) {
        const py::object error = to_python(*remote);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        throw py::error_already_set();
      }
      return describe_leaves(batch);
    }
    if (taken.error().code != Errc::kTimeout) raise_failure(taken.error());
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (steady_clock::now() >= deadline) return py::none();
  }
}

// The states that one worker sent, or None if none arrived in time.
py::object worker_states(Client& client, double timeout_s) {
  const auto deadline = steady_clock::now() + duration_of(timeout_s);
  auto states = without_gil([&] {
    auto taken = client.worker_states(deadline);
    stay_if_python_exits();
    return taken;
  });
  if (states) return py::bytes(reinterpret_cast<const char*>(states.value().data()), states.value().size());
  if (states.error().code != Errc::kTimeout) raise_failure(states.error());
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  return py::none();
}

// Returns the result of `call`, which profilers show as a range with that name.
py::object in_profiler_range(const std::string& name, const py::function& call) {
  const ProfilerRange range(name.c_str());
  return call();
}

// An object that interrupts the main thread, like Ctrl-C, when its last reference is dropped: Python discards
// interrupts that arrive while an object is finalized. Has no effect while an exception is propagating.
py::object interrupt_when_dropped() {
  static int tag = 0;
  // pybind11's capsules hide the exception from their destructors.
  const auto interrupt = [](PyObject*) {
    if (PyErr_Occurred() == nullptr) PyErr_SetInterruptEx(SIGINT);
  };
  return py::reinterpret_steal<py::object>(PyCapsule_New(&tag, nullptr, interrupt));
}

}  // namespace

void bind_loader(py::module_& module) {
  module.def("interrupt_when_dropped", &interrupt_when_dropped);
  module.def("set_batch_types", &set_batch_types, py::arg("flatten"), py::arg("make"));
  module.def("is_profiled", &is_profiled);
  module.def("in_profiler_range", &in_profiler_range, py::arg("name"), py::arg("call"));
  py::class_<loader::AheadWishes, std::shared_ptr<loader::AheadWishes>>(module, "AheadWishes")
      .def(py::init<>())
      .def(
          "set",
          [](loader::AheadWishes& self, const std::string& device, std::vector<uint32_t> leaves,
             std::vector<std::string> keys) {
            self.set(std::make_shared<loader::AheadRequest>(loader::AheadRequest{
                .device = c10::Device(device), .leaves = std::move(leaves), .keys = std::move(keys)}));
          },
          py::arg("device"), py::arg("leaves"), py::arg("keys"))
      .def("clear", [](loader::AheadWishes& self) { self.set(nullptr); });
  py::class_<loader::AheadCopies, std::shared_ptr<loader::AheadCopies>>(module, "AheadCopies")
      .def_property_readonly("device", [](const loader::AheadCopies& self) { return self.device().str(); })
      .def("take", [](loader::AheadCopies& self, size_t place) -> py::object {
        const auto tensor = without_gil([&] { return self.take(place); });
        return tensor ? wrap_tensor(*tensor) : py::none();
      });
  py::class_<Client, std::shared_ptr<Client>> client(module, "Client");
  client
      .def(py::init([](uint32_t worker_count, uint32_t prefetch_factor, uint64_t prefetch_bytes, uint32_t shard_count,
                       uint32_t slab_count, uint32_t overtaking_max, bool any_worker, bool keep_workers,
                       bool keep_indices, bool pin_memory, const std::optional<std::string>& device,
                       const std::shared_ptr<loader::AheadWishes>& ahead) {
             return std::make_shared<Client>(loader::ClientOptions{.worker_count = worker_count,
                                                                   .prefetch_factor = prefetch_factor,
                                                                   .slab_count = slab_count,
                                                                   .shard_count = shard_count,
                                                                   .prefetch_bytes = prefetch_bytes,
                                                                   .overtaking_max = overtaking_max,
                                                                   .any_worker = any_worker,
                                                                   .keep_workers = keep_workers,
                                                                   .keep_indices = keep_indices,
                                                                   .pin_memory = pin_memory,
                                                                   .device = device::device_named(device),
                                                                   .ahead = ahead});
           }),
           py::kw_only(), py::arg("worker_count"), py::arg("prefetch_factor"), py::arg("prefetch_bytes"),
           py::arg("shard_count"), py::arg("slab_count"), py::arg("overtaking_max"), py::arg("any_worker"),
           py::arg("keep_workers"), py::arg("keep_indices"), py::arg("pin_memory"), py::arg("device"), py::arg("ahead"))
      .def(
          "open_channel",
          [](Client& self, uint32_t worker_id) {
            const loader::ChannelFds ends = unwrap(self.open_channel(worker_id));
            return std::pair(ends.trainer, ends.worker);
          },
          py::arg("worker_id"))
      .def(
          "note_started",
          [](Client& self, uint32_t worker_id, pid_t pid) { unwrap(self.note_started(worker_id, pid)); },
          py::arg("worker_id"), py::arg("pid"))
      .def("start", [](Client& self) { unwrap(self.start()); })
      .def("drop_epoch", [](Client& self) { self.begin_epoch(); })
      .def("awaited",
           [](const Client& self) -> py::object {
             const auto awaited = self.awaited();
             if (!awaited) return py::none();
             const bool is_pickled = awaited->index_kind == wire::IndexKind::kPickle;
             return py::make_tuple(awaited->worker_id, awaited->sequence,
                                   indices_to_python(awaited->index_kind, awaited->indices), is_pickled);
           })
      .def(
          "install_prefix",
          [](Client& self, const py::bytes& message) { self.broadcast(wire::ToJob::Kind::kPrefix, bytes_of(message)); })
      .def("want_states", &Client::want_states, py::arg("every"), py::arg("question"))
      .def("worker_states", &worker_states, py::arg("timeout_s"))
      .def("remove_prefixes", [](Client& self) { self.broadcast(wire::ToJob::Kind::kRemovePrefixes, {}); })
      .def("stop",
           [](Client& self) {
             without_gil([&] {
               self.stop();
               return true;
             });
           })
      .def("retire_held", &Client::retire_held);
  py::class_<BatchRecord::Origin>(module, "BatchOrigin");
  client.def("recall", &Client::recall, py::arg("origin"))
      .def("recalled", &recalled, py::arg("origin"), py::arg("timeout_s"))
      .def("forget_recall", &Client::forget_recall, py::arg("origin"));
  py::enum_<Client::Event::Kind>(client, "Event", py::arithmetic())
      .value("BATCH", Client::Event::Kind::kBatch)
      .value("SHARD_ENDED", Client::Event::Kind::kShardEnded)
      .value("WORKER_LOST", Client::Event::Kind::kWorkerLost)
      .value("WORKER_GONE", Client::Event::Kind::kWorkerGone)
      .value("END", Client::Event::Kind::kEnd)
      .value("NEWS", Client::Event::Kind::kNews)
      .value("NOTHING", Client::Event::Kind::kNothing);

  py::class_<EpochProgress, std::shared_ptr<EpochProgress>>(module, "EpochProgress")
      .def(py::init<uint32_t>(), py::arg("shard_count"))
      .def_property_readonly("answered_count", &EpochProgress::answered_count)
      .def_property_readonly("yielded_count", &EpochProgress::yielded_count)
      .def_property_readonly("shard_counts", &EpochProgress::shard_counts)
      .def_property_readonly("last_shard_id", &EpochProgress::last_shard_id)
      .def_property_readonly("is_finished", &EpochProgress::is_finished)
      .def(
          "shard_state",
          [](const EpochProgress& self, uint32_t shard_id) { return bytes_or_none(self.shard_state(shard_id)); },
          py::arg("shard_id"))
      .def("shard_state_count", &EpochProgress::shard_state_count, py::arg("shard_id"))
      .def(
          "set_shard_state",
          [](EpochProgress& self, uint32_t shard_id, const py::bytes& state) {
            const auto bytes = bytes_of(state);
            self.set_shard_state(shard_id, {bytes.begin(), bytes.end()});
          },
          py::arg("shard_id"), py::arg("state"))
      .def("answer", &EpochProgress::answer, py::arg("shard_id"), py::arg("is_error"))
      .def("note_error", &EpochProgress::note_error)
      .def("skip_answer", &EpochProgress::skip_answer)
      .def("finish", &EpochProgress::finish)
      .def("resume", &EpochProgress::resume, py::arg("answered_count"), py::arg("yielded_count"),
           py::arg("last_shard_id"))
      .def("set_shard_answers", &EpochProgress::set_shard_answers, py::arg("shard_id"), py::arg("count"))
      .def("share_out", &EpochProgress::share_out, py::arg("shard_count"));

  py::class_<Stream>(module, "Stream")
      .def(py::init([](std::shared_ptr<Client> client, bool is_iterable, bool asks_while_room, bool may_begin_early,
                       bool is_seeded_by_batch) {
             return std::make_unique<Stream>(std::move(client),
                                             loader::StreamOptions{.is_iterable = is_iterable,
                                                                   .asks_while_room = asks_while_room,
                                                                   .may_begin_early = may_begin_early,
                                                                   .is_seeded_by_batch = is_seeded_by_batch});
           }),
           py::arg("client"), py::kw_only(), py::arg("is_iterable"), py::arg("asks_while_room"),
           py::arg("may_begin_early"), py::arg("is_seeded_by_batch"))
      .def(
          "begin_with_sampler",
          [](Stream& self, int64_t base_seed, int64_t epoch, bool by_sample, std::shared_ptr<EpochProgress> progress,
             std::optional<at::Generator> base_generator, int64_t sample_count, int64_t batch_size, bool drop_last,
             bool shuffle, std::optional<at::Generator> generator, std::optional<sampling::RankShareOptions> share) {
            auto plan = plan_of(base_seed, epoch, by_sample, std::move(progress));
            plan.base_generator = std::move(base_generator);
            self.begin_epoch(std::move(plan), {.sample_count = sample_count,
                                               .batch_size = batch_size,
                                               .drop_last = drop_last,
                                               .shuffle = shuffle,
                                               .generator = std::move(generator),
                                               .share = share});
          },
          py::kw_only(), py::arg("base_seed"), py::arg("epoch"), py::arg("by_sample"), py::arg("progress"),
          py::arg("base_generator"), py::arg("sample_count"), py::arg("batch_size"), py::arg("drop_last"),
          py::arg("shuffle"), py::arg("generator"), py::arg("share"))
      .def(
          "begin_with_indices",
          [](Stream& self, int64_t base_seed, int64_t epoch, bool by_sample, std::shared_ptr<EpochProgress> progress,
             py::function pull, py::function dumps) {
            self.begin_epoch(plan_of(base_seed, epoch, by_sample, std::move(progress)),
                             std::make_unique<PulledIndices>(std::move(pull), std::move(dumps)));
          },
          py::kw_only(), py::arg("base_seed"), py::arg("epoch"), py::arg("by_sample"), py::arg("progress"),
          py::arg("pull"), py::arg("dumps"))
      .def("next", &next, py::arg("timeout_s"), py::arg("loads"), py::arg("open_storage"), py::arg("stand_in"))
      .def("look_ahead", &look_ahead, py::arg("batch_count"), py::arg("timeout_s"), py::arg("loads"),
           py::arg("open_storage"), py::arg("stand_in"))
      .def("give_ahead",
           [](Stream& self) {
             PENSTOCK_ASSERT(!self.ahead().empty(), "no batch was looked ahead");
             static_cast<void>(self.try_next());
           })
      .def("drop_rest", &Stream::drop_rest)
      .def("begin_steps", [](Stream& self) { self.client().ledger().begin_epoch(clock_now()); })
      .def("enter_step", [](Stream& self) { self.client().ledger().enter(clock_now()); })
      .def("leave_step", [](Stream& self) { self.client().ledger().leave(clock_now()); })
      .def("begin_ranks", [](Stream& self) { self.client().ledger().begin_ranks(clock_now()); })
      .def("end_ranks", [](Stream& self) { self.client().ledger().end_ranks(clock_now()); })
      .def("workers", &workers_of)
      .def("slow_samples", &slow_samples_of)
      .def(
          "record_steps", [](Stream& self, size_t count_max) { self.client().ledger().record(count_max); },
          py::arg("count_max"))
      .def("step_records", &step_records_of)
      .def_property_readonly("worker_count", [](Stream& self) { return self.client().worker_count(); })
      .def("load_counters", &load_counters_of)
      .def("counters", &counters_of);
}

}  // namespace penstock::bindings
