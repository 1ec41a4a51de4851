// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>

#include "bindings/python_indices.h"
#include "bindings/python_nest.h"
#include "bindings/raise.h"
#include "loader/client.h"

namespace py = pybind11;

namespace penstock::bindings {

using loader::Batch;
using loader::Client;
using std::chrono::steady_clock;

namespace {

constexpr auto kWaitSlice = std::chrono::milliseconds(50);  // how late Ctrl-C may be noticed while waiting

// Sleeps without the interpreter lock until something arrives, looking after signals. False at the deadline.
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

// The trainer's view of a batch beyond its value: its leaves in table order, its boundary tensors by key, and the
// number that it was asked for by.
py::tuple describe_leaves(Batch& batch) {
  const auto& tensors = batch.tensors();
  const size_t leaf_count = batch.frame().leaf_count();
  py::list leaves;
  py::dict boundary;
  for (size_t index = 0; index < tensors.size(); ++index) {
    if (index < leaf_count) {
      leaves.append(wrap_tensor(tensors[index]));
    } else {
      boundary[py::str(std::string(batch.frame().boundary_keys[index - leaf_count]))] = wrap_tensor(tensors[index]);
    }
  }
  return py::make_tuple(leaves, boundary, batch.descriptor().sequence);
}

py::tuple to_python(Client::Event event, const py::object& loads, bool with_leaves) {
  const int kind = static_cast<int>(event.kind);
  if (event.kind == Client::Event::Kind::kFailed) raise_failure(*event.error);
  if (event.kind == Client::Event::Kind::kNews)
    return py::make_tuple(kind, event.error->message, py::none(), event.shard_id, py::none());
  if (event.kind != Client::Event::Kind::kBatch) {
    return py::make_tuple(kind, event.worker_id, event.is_worker_done, event.shard_id, py::none());
  }
  Batch& batch = *event.batch;
  py::object state = py::none();
  if (!batch.state().empty())
    state = py::bytes(reinterpret_cast<const char*>(batch.state().data()), batch.state().size());
  if (const auto& remote = batch.remote_error()) {
    const auto make_error = py::module_::import("penstock.pool.worker_errors").attr("make_error");
    const std::string where = remote->worker.empty() ? "" : "in penstock worker " + remote->worker;
    const auto error = make_error(remote->type_name, remote->text, where);
    return py::make_tuple(kind, error, py::bool_(false), event.shard_id, std::move(state));
  }
  py::object value;
  try {
    value = decode_nest(batch.frame().nest, batch.tensors(), loads);
  } catch (py::error_already_set& error) {
    // The batch cannot be rebuilt here. It is raised in its place, after its successor was asked for.
    return py::make_tuple(kind, error.value(), py::bool_(false), event.shard_id, std::move(state));
  }
  py::object extra = py::none();
  if (batch.raises()) {
    extra = py::bool_(true);
  } else if (with_leaves) {
    extra = describe_leaves(batch);
  }
  if (!batch.has_state())
    return py::make_tuple(kind, std::move(value), std::move(extra), event.shard_id, std::move(state));
  const auto pair = value.cast<py::tuple>();
  return py::make_tuple(kind, pair[0], std::move(extra), event.shard_id, pair[1]);
}

std::span<const std::byte> bytes_of(const py::bytes& object) {
  const auto view = static_cast<std::string_view>(object);
  return std::as_bytes(std::span(view.data(), view.size()));
}

bool submit(Client& client, const py::object& index, const py::object& dumps) {
  using wire::IndexKind;
  if (PyList_CheckExact(index.ptr())) {
    std::vector<int64_t> indices;
    indices.reserve(static_cast<size_t>(PyList_GET_SIZE(index.ptr())));
    bool is_plain = true;
    for (py::handle item : py::reinterpret_borrow<py::list>(index)) {
      int overflow = 0;
      is_plain = is_plain && PyLong_CheckExact(item.ptr());
      if (!is_plain) break;
      indices.push_back(PyLong_AsLongLongAndOverflow(item.ptr(), &overflow));
      is_plain = overflow == 0;
    }
    if (is_plain) return client.submit(IndexKind::kIntegers, std::as_bytes(std::span(indices)));
  }
  if (PyLong_CheckExact(index.ptr())) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow == 0) return client.submit(IndexKind::kInteger, std::as_bytes(std::span(&value, 1)));
  }
  const auto pickled = dumps(index).cast<py::bytes>();
  return client.submit(IndexKind::kPickle, bytes_of(pickled));
}

void use_index_stream(Client& client, int64_t sample_count, int64_t batch_size, bool drop_last, bool shuffle,
                      std::optional<at::Generator> generator, int64_t skipped_batch_count) {
  client.use_index_stream({.sample_count = sample_count,
                           .batch_size = batch_size,
                           .drop_last = drop_last,
                           .shuffle = shuffle,
                           .generator = std::move(generator),
                           .skipped_batch_count = skipped_batch_count});
}

void begin_early(Client& client, const py::bytes& seeds, int64_t sample_count, int64_t batch_size, bool drop_last,
                 bool shuffle, std::optional<at::Generator> generator, std::optional<uint64_t> seed,
                 uint64_t epoch_seed) {
  client.begin_early(bytes_of(seeds),
                     {.sample_count = sample_count,
                      .batch_size = batch_size,
                      .drop_last = drop_last,
                      .shuffle = shuffle,
                      .generator = std::move(generator),
                      .seed = seed},
                     epoch_seed);
}

py::dict counters_of(const Client& client) {
  const auto& counters = client.counters();
  py::dict result;
  result["batches"] = counters.batches.value();
  result["batch_bytes"] = counters.batch_bytes.value();
  result["copied_batches"] = counters.copied_batches.value();
  result["inline_batches"] = counters.inline_batches.value();
  result["stale_batches"] = counters.stale_batches.value();
  result["early_batches"] = counters.early_batches.value();
  result["boundary_batches"] = counters.boundary_batches.value();
  result["compiled_batches"] = counters.compiled_batches.value();
  result["unrepeatable_batches"] = counters.unrepeatable_batches.value();
  result["arenas"] = counters.arenas.value();
  result["waits"] = counters.waits.value();
  result["wait_s"] = static_cast<double>(counters.wait_ns.value()) * 1e-9;
  result["fetch_s"] = static_cast<double>(counters.fetch_ns.value()) * 1e-9;
  result["prefix_s"] = static_cast<double>(counters.prefix_ns.value()) * 1e-9;
  result["outstanding"] = client.outstanding_count();
  result["ready"] = client.ready_count();
  return result;
}

// What is looked at for every batch: a tuple is made several times faster than a dict of all.
py::tuple load_counters_of(const Client& client) {
  const auto& counters = client.counters();
  return py::make_tuple(counters.batches.value(), counters.boundary_batches.value(),
                        static_cast<double>(counters.fetch_ns.value()) * 1e-9,
                        static_cast<double>(counters.prefix_ns.value()) * 1e-9);
}

}  // namespace

void bind_loader(py::module_& module) {
  py::class_<Client> client(module, "Client");
  client
      .def(py::init([](uint32_t worker_count, uint32_t prefetch_factor, uint64_t prefetch_bytes, uint32_t shard_count,
                       bool in_order, bool keep_workers, bool keep_indices, bool pin_memory, int device_index) {
             return std::make_unique<Client>(loader::ClientOptions{.worker_count = worker_count,
                                                                   .prefetch_factor = prefetch_factor,
                                                                   .shard_count = shard_count,
                                                                   .prefetch_bytes = prefetch_bytes,
                                                                   .in_order = in_order,
                                                                   .keep_workers = keep_workers,
                                                                   .keep_indices = keep_indices,
                                                                   .pin_memory = pin_memory,
                                                                   .device_index = device_index});
           }),
           py::kw_only(), py::arg("worker_count"), py::arg("prefetch_factor"), py::arg("prefetch_bytes"),
           py::arg("shard_count"), py::arg("in_order"), py::arg("keep_workers"), py::arg("keep_indices"),
           py::arg("pin_memory"), py::arg("device_index"))
      .def_property_readonly("endpoint", &Client::endpoint)
      .def("start", [](Client& self) { unwrap(self.start()); })
      .def(
          "begin_epoch",
          [](Client& self, const py::bytes& seeds, uint64_t first_sequence, uint32_t first_shard_id,
             uint64_t epoch_seed) {
            self.begin_epoch(bytes_of(seeds), {first_sequence, first_shard_id, epoch_seed});
          },
          py::arg("seeds"), py::kw_only(), py::arg("first_sequence"), py::arg("first_shard_id"), py::arg("epoch_seed"))
      .def("submit", &submit, py::arg("index"), py::arg("dumps"))
      .def("has_room", &Client::has_room)
      .def("use_index_stream", &use_index_stream, py::kw_only(), py::arg("sample_count"), py::arg("batch_size"),
           py::arg("drop_last"), py::arg("shuffle"), py::arg("generator"), py::arg("skipped_batch_count"))
      .def("submit_from_stream", &Client::submit_from_stream)
      .def("fill_from_stream", &Client::fill_from_stream)
      .def("has_stream_ended", &Client::has_stream_ended)
      .def("begin_early", &begin_early, py::arg("seeds"), py::kw_only(), py::arg("sample_count"), py::arg("batch_size"),
           py::arg("drop_last"), py::arg("shuffle"), py::arg("generator"), py::arg("seed"), py::arg("epoch_seed"))
      .def("adopt_early", &Client::adopt_early, py::arg("generator"))
      .def(
          "next",
          [](Client& self, double timeout_s, const py::object& loads, bool with_leaves) {
            // Trying first, with the lock held, saves a whole switch interval when another Python thread is computing.
            auto event = self.try_next();
            if (event.kind == Client::Event::Kind::kNothing) {
              const auto wait = std::chrono::duration_cast<steady_clock::duration>(
                  std::chrono::duration<double>(std::min(timeout_s, 1e6)));
              const auto deadline = steady_clock::now() + wait;
              while (event.kind == Client::Event::Kind::kNothing && wait_for_arrival(self, deadline)) {
                event = self.try_next();
              }
            }
            return to_python(std::move(event), loads, with_leaves);
          },
          py::arg("timeout_s"), py::arg("loads"), py::arg("with_leaves"))
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
          [](Client& self, const py::bytes& message) { self.broadcast(wire::RequestKind::kPrefix, bytes_of(message)); })
      .def("remove_prefixes", [](Client& self) { self.broadcast(wire::RequestKind::kRemovePrefixes, {}); })
      .def("stop",
           [](Client& self) {
             without_gil([&] {
               self.stop();
               return true;
             });
           })
      .def("retire_held", &Client::retire_held)
      .def("load_counters", &load_counters_of)
      .def("counters", &counters_of);
  py::enum_<Client::Event::Kind>(client, "Event", py::arithmetic())
      .value("BATCH", Client::Event::Kind::kBatch)
      .value("SHARD_ENDED", Client::Event::Kind::kShardEnded)
      .value("WORKER_LOST", Client::Event::Kind::kWorkerLost)
      .value("END", Client::Event::Kind::kEnd)
      .value("MORE_ROOM", Client::Event::Kind::kMoreRoom)
      .value("NEWS", Client::Event::Kind::kNews)
      .value("NOTHING", Client::Event::Kind::kNothing);
}

}  // namespace penstock::bindings
