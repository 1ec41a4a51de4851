// SPDX-License-Identifier: Apache-2.0
// A local worker in Python: the requests that it answers, and values as bytes.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/plain_nest.h"
#include "bindings/python_collate.h"
#include "bindings/python_content.h"
#include "bindings/python_nest.h"
#include "bindings/python_requests.h"
#include "bindings/python_rows.h"
#include "bindings/raise.h"
#include "loader/batch.h"
#include "wire/nest.h"
#include "worker/local_server.h"
#include "worker/prefix_stage.h"
#include "worker/process_memory.h"
#include "worker/read_advisor.h"
#include "worker/slab_writer.h"
#include "worker/stack.h"

namespace py = pybind11;

namespace penstock::bindings {

using std::chrono::steady_clock;
using wire::ToJob;
using worker::LocalServer;

namespace {

std::span<const int64_t> integers(const LocalServer::Received& request) {
  return {reinterpret_cast<const int64_t*>(request.indices.data()), request.indices.size() / sizeof(int64_t)};
}

// The next request; no value at the deadline or when a signal is pending. Raises ClosedError at the end.
std::optional<LocalServer::Received> next_request(LocalServer& server, double timeout_s) {
  return wait_for(timeout_s, raise_error, [&](auto deadline) { return server.next(deadline); });
}

// The flags and state that are sent with a batch's content.
struct AnswerMarks {
  bool raises = false;
  bool threads_drew = false;
  bool dataset_stays = false;
  std::optional<py::bytes> state;  // of the dataset after this batch
};

void answer(LocalServer& server, const LocalServer::Received& request, const py::object& batch,
            const AnswerMarks& marks, const py::object& dumps) {
  EncodedNest encoded =
      marks.state ? encode_nest(py::make_tuple(batch, *marks.state), dumps) : encode_nest(batch, dumps);
  const int flags = (marks.raises ? wire::kBatchRaises : 0) | (marks.threads_drew ? wire::kBatchThreadsDrew : 0) |
                    (marks.dataset_stays ? wire::kBatchDatasetStays : 0) | (marks.state ? wire::kBatchHasState : 0);
  worker::BatchContent content{.tensors = encoded.tensors, .boundary_keys = {}, .nest = encoded.nest.view()};
  unwrap(without_gil([&] { return server.answer(request, std::move(content), static_cast<uint8_t>(flags)); }));
}

// Returns false if the indices are not plain rows.
Result<bool> answer_rows(LocalServer& server, const LocalServer::Received& request,
                         const std::vector<at::Tensor>& sources) {
  const auto batch = worker::gather_batch(server.writer(), sources, integers(request));
  if (!batch) return false;
  if (auto sent = server.answer(request, batch->content(), 0); !sent) return sent.error();
  return true;
}

// Serves plain fetches without Python until another kind of request arrives, which is returned.
LocalServer::Received serve_rows(LocalServer& server, const std::vector<at::Tensor>& sources) {
  for (;;) {
    auto request = next_request(server, 3600.0);
    if (!request) continue;
    const bool is_fetch =
        request->kind == ToJob::Kind::kWork && request->request.index_kind == wire::IndexKind::kIntegers;
    if (!is_fetch) return *std::move(request);
    if (!unwrap(without_gil([&] { return answer_rows(server, *request, sources); }))) return *std::move(request);
  }
}

// Whether only this process can write to the memory of the tensors, which are on the CPU.
bool are_own(const std::vector<at::Tensor>& tensors) {
  const auto memory = worker::ProcessMemory::read();
  return memory && std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
           const at::Storage& storage = tensor.storage();
           const auto kind = memory.value().kind_of({static_cast<const std::byte*>(storage.data()), storage.nbytes()});
           return kind == worker::MemoryKind::kOwn || kind == worker::MemoryKind::kReadOnly;
         });
}

std::optional<py::bytes> digest_of(PlainContent& content, const py::object& value) {
  const auto digest = content.digest(value);
  if (!digest) return std::nullopt;
  return py::bytes(reinterpret_cast<const char*>(digest->data()), sizeof *digest);
}

}  // namespace

void bind_worker(py::module_& module) {
  module.def("tune_malloc", &worker::tune_malloc);
  module.def("is_plain_tensor", [](py::handle object) {
    return is_exact_tensor(object.ptr()) && worker::is_plain_tensor(THPVariable_Unpack(object.ptr()));
  });
  module.def("are_own", &are_own, py::arg("tensors"));
  py::class_<PlainContent>(module, "PlainContent")
      .def(py::init<double>(), py::arg("cost_s_max"))
      .def("digest", &digest_of, py::arg("value"))
      .def("spend", &PlainContent::spend, py::arg("cost_s"))
      .def_property_readonly("is_opaque", &PlainContent::is_opaque);
  module.def(
      "encode_prefix",
      [](const std::string& text, const std::vector<at::Tensor>& constants, uint64_t seed, const py::bytes& library,
         const std::vector<std::pair<uint32_t, at::Tensor>>& library_leaves) {
        worker::PrefixMessage prefix{
            .text = text, .constants = constants, .seed = seed, .library = std::string(library), .library_leaves = {}};
        for (const auto& [leaf_index, leaf] : library_leaves)
          prefix.library_leaves.push_back({.leaf_index = leaf_index,
                                           .dtype = leaf.scalar_type(),
                                           .sizes = leaf.sizes().vec(),
                                           .strides = leaf.strides().vec()});
        const auto message = unwrap(worker::write_prefix_message(prefix));
        return py::bytes(reinterpret_cast<const char*>(message.data()), message.size());
      },
      py::arg("text"), py::arg("constants"), py::arg("seed"), py::arg("library") = py::bytes(),
      py::arg("library_leaves") = py::list());
  bind_timed_fetch(module);
  py::class_<PythonSampleRows>(module, "SampleRows")
      .def("begin", &PythonSampleRows::begin, py::arg("sample_count"))
      .def("fetch", &PythonSampleRows::fetch, py::arg("dataset"), py::arg("index"))
      .def("end", &PythonSampleRows::end);
  py::class_<worker::ReadAdvisor>(module, "ReadAdvisor")
      .def(py::init<size_t>(), py::arg("thread_count") = 8)
      .def("advise", &worker::ReadAdvisor::advise, py::arg("paths"))
      .def_property_readonly("checked", [](const worker::ReadAdvisor& self) { return self.counts().checked; })
      .def_property_readonly("cold", [](const worker::ReadAdvisor& self) { return self.counts().cold; });
  py::class_<LocalServer::Received>(module, "WorkerRequest")
      .def_property_readonly("is_epoch",
                             [](const LocalServer::Received& self) { return self.kind == ToJob::Kind::kEpoch; })
      .def_property_readonly("is_early_epoch",
                             [](const LocalServer::Received& self) { return self.kind == ToJob::Kind::kEarlyEpoch; })
      .def_property_readonly("is_for_states",
                             [](const LocalServer::Received& self) { return self.kind == ToJob::Kind::kStates; })
      .def_property_readonly("epoch", [](const LocalServer::Received& self) { return self.request.epoch; })
      .def_property_readonly(
          "is_pickled",
          [](const LocalServer::Received& self) { return self.request.index_kind == wire::IndexKind::kPickle; })
      .def_property_readonly("sequence", [](const LocalServer::Received& self) { return self.request.sequence; })
      .def_property_readonly("first_place", [](const LocalServer::Received& self) { return self.request.first_place; })
      .def_property_readonly("shard_id", [](const LocalServer::Received& self) { return self.request.shard_id; })
      .def("indices",
           [](const LocalServer::Received& self) { return indices_to_python(self.request.index_kind, self.indices); });
  py::class_<LocalServer>(module, "WorkerServer")
      .def_static(
          "open",
          [](int channel_fd, uint32_t prefetch_factor, uint64_t arena_bytes, bool waits_for_slabs, pid_t trainer_pid) {
            return unwrap(without_gil([&] {
              return LocalServer::open({.prefetch_factor = prefetch_factor,
                                        .arena_bytes = arena_bytes,
                                        .waits_for_slabs = waits_for_slabs,
                                        .trainer_pid = trainer_pid},
                                       FileDescriptor(channel_fd));
            }));
          },
          py::kw_only(), py::arg("channel_fd"), py::arg("prefetch_factor"), py::arg("arena_bytes"),
          py::arg("waits_for_slabs"), py::arg("trainer_pid"))
      .def("next", &next_request, py::arg("timeout_s"))
      .def("upcoming", &LocalServer::upcoming)
      .def("begin", [](LocalServer& self) { self.writer().begin(); })
      .def(
          "fetch_clock", [](LocalServer& self) -> dataset::FetchClock& { return self.writer().clock(); },
          py::return_value_policy::reference_internal)
      .def(
          "answer",
          [](LocalServer& self, const LocalServer::Received& request, const py::object& batch, bool raises,
             bool threads_drew, bool dataset_stays, std::optional<py::bytes> state, const py::object& dumps) {
            answer(self, request, batch, {raises, threads_drew, dataset_stays, std::move(state)}, dumps);
          },
          py::arg("request"), py::arg("batch"), py::arg("raises"), py::arg("threads_drew"), py::arg("dataset_stays"),
          py::arg("state"), py::arg("dumps"))
      .def(
          "answer_end",
          [](LocalServer& self, const LocalServer::Received& request, const std::optional<std::string>& state) {
            const auto bytes = state ? std::as_bytes(std::span(*state)) : std::span<const std::byte>();
            unwrap(without_gil([&] { return self.answer_end(request, bytes); }));
          },
          py::arg("request"), py::arg("state"))
      .def(
          "answer_states",
          [](LocalServer& self, const LocalServer::Received& request, const std::string& states) {
            unwrap(without_gil([&] { return self.answer_states(request, std::as_bytes(std::span(states))); }));
          },
          py::arg("request"), py::arg("states"))
      .def("serve_rows", &serve_rows, py::arg("sources"))
      .def(
          "collate",
          [](LocalServer& self, const py::list& samples, const py::object& default_collate) {
            return collate(self.writer(), samples, default_collate);
          },
          py::arg("samples"), py::arg("default_collate"))
      .def(
          "sample_rows", [](LocalServer& self) { return std::make_unique<PythonSampleRows>(self.writer()); },
          py::keep_alive<0, 1>())
      .def("new_bytes", [](LocalServer& self, int64_t bytes) {
        at::Tensor tensor = self.writer().new_bytes(bytes);
        return tensor.defined() ? wrap_tensor(tensor) : py::none();
      });
}

namespace {

// Writes a standalone value as bytes, such as a dataset's state sent from a worker to the trainer: a plain nest in a
// packed record.
py::bytes encode_value(py::handle object, const std::string& name) {
  const EncodedNest encoded = encode_plain_nest(object, name);
  wire::Frame frame{.tensors = {}, .boundary_keys = {}, .nest = encoded.nest.view()};
  std::vector<std::span<const std::byte>> sources;
  std::ranges::transform(encoded.tensors, std::back_inserter(frame.tensors), &worker::describe_tensor);
  std::ranges::transform(encoded.tensors, frame.tensors, std::back_inserter(sources),
                         [](const at::Tensor& tensor, const wire::TensorEntry& entry) {
                           return std::span(static_cast<const std::byte*>(tensor.const_data_ptr()), entry.bytes);
                         });
  const auto bytes = wire::write_packed_record(std::move(frame), sources);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Reads such bytes, which are not trusted.
py::object decode_value(const py::bytes& value) {
  const auto view = static_cast<std::string_view>(value);
  const auto packed = wire::parse_packed_record(std::as_bytes(std::span(view)));
  if (!packed) raise_failure(packed.error());
  const auto [record, payload] = std::pair(packed.value().record, packed.value().payload);
  auto batch = loader::Batch::from_parts({}, {record.begin(), record.end()}, {payload.begin(), payload.end()},
                                         /*allow_pickle=*/false);
  if (!batch) raise_failure(batch.error());
  return decode_nest(batch.value()->record().frame().nest, batch.value()->tensors().all(), py::none());
}

// Whether the type of each value is exactly one of the immutable atomic types.
bool has_only_atoms(const py::list& values) {
  return std::ranges::all_of(values, [](const py::handle value) {
    PyObject* const object = value.ptr();
    return PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) ||
           PyBytes_CheckExact(object) || PyBool_Check(object) || object == Py_None;
  });
}

}  // namespace

void bind_values(py::module_& module) {
  module.def("encode_value", &encode_value, py::arg("value"), py::arg("name") = "value");
  module.def("decode_value", &decode_value, py::arg("data"));
  module.def("has_only_atoms", &has_only_atoms, py::arg("values"));
}

}  // namespace penstock::bindings
