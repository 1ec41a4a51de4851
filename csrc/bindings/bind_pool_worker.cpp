// SPDX-License-Identifier: Apache-2.0
// A pool worker that makes batches in Python: the requests that it answers, as a single process with its server or as a
// job process, and the channel over which the server orders job processes from the warm process.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/prctl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "bindings/plain_nest.h"
#include "bindings/python_collate.h"
#include "bindings/python_nest.h"
#include "bindings/python_requests.h"
#include "bindings/python_rows.h"
#include "bindings/raise.h"
#include "server/server_program.h"
#include "wire/reports.h"
#include "worker/batch_server.h"
#include "worker/job_channel.h"
#include "worker/stack.h"
#include "worker/warm_channel.h"

namespace py = pybind11;

namespace penstock::bindings {

using server::PoolWork;
using wire::BlobId;
using worker::BatchServer;
using worker::PoolServer;

namespace {

struct Settings {
  server::ServerAddresses addresses;
  std::string about;
  std::string name;
  uint64_t arena_bytes;
  uint64_t blob_bytes_max;
  double patience_s;
  pid_t parent_pid;
  std::string handover;
  std::string powercap;
  int exit_fd;
  double grace_s;
};

Result<std::unique_ptr<PoolServer>> start(const Settings& settings) {
  auto read = server::options_at(settings.addresses);
  if (!read) return read.error();
  server::PoolServerOptions options = std::move(read).value();
  options.about = settings.about;
  options.name = settings.name;
  options.torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
  options.arena_bytes = settings.arena_bytes;
  options.blob_bytes_max = settings.blob_bytes_max;
  options.patience = duration_of(settings.patience_s);
  options.parent_pid = settings.parent_pid;
  options.handover = settings.handover;
  options.powercap = settings.powercap;
  options.supervisor = exit_line_writer(settings.exit_fd);
  options.drain_grace = duration_of(settings.grace_s);
  return PoolServer::start(std::move(options));
}

py::bytes to_python(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> copy_of(const std::optional<py::bytes>& value) {
  if (!value) return {};
  const auto bytes = std::as_bytes(std::span(static_cast<std::string_view>(*value)));
  return {bytes.begin(), bytes.end()};
}

std::optional<py::bytes> fetch_blob(BatchServer& server, const std::string& id_bytes, double timeout_s) {
  const BlobId id = blob_id(id_bytes);
  const auto bytes = wait_for(timeout_s, raise_failure, [&](auto deadline) { return server.blob(id, deadline); });
  return bytes ? std::optional(to_python(*bytes)) : std::nullopt;
}

uint64_t size_on_wire(const std::optional<int64_t>& dataset_size) {
  if (!dataset_size) return wire::kSizeUnknown;
  return *dataset_size < 0 ? wire::kNoSize : static_cast<uint64_t>(*dataset_size);
}

void answer(BatchServer& server, const PoolWork& work, const py::object& batch, bool threads_drew,
            const std::optional<py::bytes>& state, const py::object& dumps, uint32_t sample_count,
            const std::optional<int64_t>& dataset_size, bool may_be_kept, bool draws_nothing) {
  EncodedNest encoded = dumps.is_none() ? encode_plain_nest(batch, "batch") : encode_nest(batch, dumps);
  worker::BatchContent content{.tensors = encoded.tensors, .boundary_keys = {}, .nest = encoded.nest.view()};
  worker::PoolMarks marks{.flags = threads_drew ? wire::kBatchThreadsDrew : uint8_t{0},
                          .state = copy_of(state),
                          .sample_count = sample_count,
                          .dataset_size = size_on_wire(dataset_size),
                          .may_be_kept = may_be_kept,
                          .draws_nothing = draws_nothing};
  unwrap(without_gil([&] { return server.answer(work, std::move(content), std::move(marks)); }));
}

// Answers with a batch of a TensorDataset. Returns false if the request's indices are not plain rows.
Result<bool> answer_rows(BatchServer& server, const PoolWork& work, const std::vector<at::Tensor>& sources,
                         const std::optional<int64_t>& dataset_size, bool may_be_kept) {
  if (work.index_kind != wire::IndexKind::kIntegers) return false;
  const std::span indices(reinterpret_cast<const int64_t*>(work.indices.data()), work.indices.size() / sizeof(int64_t));
  const auto batch = worker::gather_batch(server.writer(), sources, indices);
  if (!batch) return false;
  worker::PoolMarks marks{.sample_count = static_cast<uint32_t>(indices.size()),
                          .dataset_size = size_on_wire(dataset_size),
                          .may_be_kept = may_be_kept,
                          .draws_nothing = may_be_kept};
  if (auto sent = server.answer(work, batch->content(), std::move(marks)); !sent) return sent.error();
  return true;
}

}  // namespace

void bind_pool_worker(py::module_& module) {
  py::class_<PoolWork, std::shared_ptr<PoolWork>>(module, "PoolWork")
      .def_property_readonly("trainer_id", [](const PoolWork& self) { return self.trainer_id; })
      .def_property_readonly("tenancy", [](const PoolWork& self) { return self.tenancy; })
      .def_property_readonly("epoch", [](const PoolWork& self) { return self.key.epoch; })
      .def_property_readonly("sequence", &PoolWork::number)
      .def_property_readonly("first_place", [](const PoolWork& self) { return self.first_place; })
      .def_property_readonly("is_recall", &PoolWork::is_recall)
      .def_property_readonly("is_named", [](const PoolWork& self) { return self.is_named; })
      .def_property_readonly("lane", [](const PoolWork& self) { return self.lane; })
      .def_property_readonly("is_lane_start", [](const PoolWork& self) { return self.is_lane_start; })
      .def_property_readonly("is_pickled",
                             [](const PoolWork& self) { return self.index_kind == wire::IndexKind::kPickle; })
      .def("indices", [](const PoolWork& self) { return indices_to_python(self.index_kind, self.indices); })
      .def_property_readonly("seeds", [](const PoolWork& self) { return to_python(self.seeds); })
      .def_property_readonly("state", [](const PoolWork& self) { return to_python(self.state); })
      .def_property_readonly("blobs", [](const PoolWork& self) {
        std::vector<py::bytes> ids;
        for (const BlobId& id : self.blobs) ids.push_back(to_python(id));
        return ids;
      });
  py::class_<server::Standing>(module, "PoolStanding")
      .def_readonly("trainer_id", &server::Standing::trainer_id)
      .def_property_readonly("drain_cause",
                             [](const server::Standing& self) -> std::optional<std::string_view> {
                               if (self.drain_cause == server::Standing::DrainCause::kNone) return std::nullopt;
                               return server::name_of(self.drain_cause);
                             })
      .def_readonly("left_count", &server::Standing::left_count);
  // Python only ever owns instances of the derived classes below.
  py::class_<BatchServer, std::unique_ptr<BatchServer, py::nodelete>>(module, "BatchServer")
      .def(
          "next",
          [](BatchServer& self, double timeout_s) {
            auto work = wait_for(timeout_s, raise_failure, [&](auto deadline) { return self.next(deadline); });
            return work ? std::const_pointer_cast<PoolWork>(*work) : nullptr;  // None
          },
          py::arg("timeout_s"))
      .def("take_notices", &BatchServer::take_notices)
      .def_property_readonly("standing", &BatchServer::standing)
      .def_property_readonly("is_wanted", &BatchServer::is_wanted)
      .def("blob", &fetch_blob, py::arg("id"), py::arg("timeout_s"))
      .def(
          "has_prefix", [](BatchServer& self, const std::string& id) { return self.prefixes().has(blob_id(id)); },
          py::arg("id"))
      .def(
          "add_prefix",
          [](BatchServer& self, const std::string& id, const py::bytes& message) {
            self.prefixes().put(blob_id(id), std::as_bytes(std::span(static_cast<std::string_view>(message))));
          },
          py::arg("id"), py::arg("message"))
      .def("begin", [](BatchServer& self) { self.writer().begin(); })
      .def(
          "fetch_clock", [](BatchServer& self) -> dataset::FetchClock& { return self.writer().clock(); },
          py::return_value_policy::reference_internal)
      .def("answer", &answer, py::arg("work"), py::arg("batch"), py::arg("threads_drew"), py::arg("state"),
           py::arg("dumps"), py::arg("sample_count"), py::arg("dataset_size"), py::arg("may_be_kept") = false,
           py::arg("draws_nothing") = false)
      .def(
          "answer_rows",
          [](BatchServer& self, const PoolWork& work, const std::vector<at::Tensor>& sources,
             std::optional<int64_t> dataset_size, bool may_be_kept) {
            return unwrap(without_gil([&] { return answer_rows(self, work, sources, dataset_size, may_be_kept); }));
          },
          py::arg("work"), py::arg("sources"), py::arg("dataset_size"), py::arg("may_be_kept") = false)
      .def(
          "answer_kept",
          [](BatchServer& self, const PoolWork& work) {
            return unwrap(without_gil([&] { return self.answer_kept(work); }));
          },
          py::arg("work"))
      .def(
          "answer_end", [](BatchServer& self, const PoolWork& work) { self.answer_end(work); }, py::arg("work"))
      .def(
          "answer_error",
          [](BatchServer& self, const PoolWork& work, std::string type_name, std::string text,
             const std::optional<py::bytes>& state) {
            unwrap(self.answer_error(work, {std::move(type_name), std::move(text)}, copy_of(state)));
          },
          py::arg("work"), py::arg("type_name"), py::arg("text"), py::arg("state"))
      .def("give_up", &BatchServer::give_up)
      .def("decline", &BatchServer::decline, py::arg("reason"))
      .def("leave", &BatchServer::leave, py::arg("reason"))
      .def("drain", &BatchServer::drain)
      .def(
          "collate",
          [](BatchServer& self, const py::list& samples, const py::object& default_collate) {
            return collate(self.writer(), samples, default_collate);
          },
          py::arg("samples"), py::arg("default_collate"))
      .def(
          "sample_rows", [](BatchServer& self) { return std::make_unique<PythonSampleRows>(self.writer()); },
          py::keep_alive<0, 1>())
      .def("new_bytes", [](BatchServer& self, int64_t bytes) {
        at::Tensor tensor = self.writer().new_bytes(bytes);
        return tensor.defined() ? wrap_tensor(tensor) : py::none();
      });
  // The C++ class has another base class before this one.
  py::class_<PoolServer, BatchServer, PoolServer::Handle>(module, "PoolServer", py::multiple_inheritance())
      .def_static(
          "start",
          [](const std::string& bind, std::optional<std::string> advertised, std::optional<std::string> data_bind,
             std::optional<std::string> data_advertised, std::optional<std::string> controller,
             std::optional<std::string> key_folder, const std::string& about, const std::string& name,
             uint64_t arena_bytes, uint64_t blob_bytes_max, double patience_s, pid_t parent_pid,
             const std::string& handover, const std::string& powercap, int exit_fd, double grace_s) {
            auto started = unwrap(without_gil([&] {
              return start({.addresses = {.bind = bind,
                                          .controller = std::move(controller),
                                          .advertised = std::move(advertised),
                                          .data_bind = std::move(data_bind),
                                          .data_advertised = std::move(data_advertised),
                                          .key_folder = std::move(key_folder)},
                            .about = about,
                            .name = name,
                            .arena_bytes = arena_bytes,
                            .blob_bytes_max = blob_bytes_max,
                            .patience_s = patience_s,
                            .parent_pid = parent_pid,
                            .handover = handover,
                            .powercap = powercap,
                            .exit_fd = exit_fd,
                            .grace_s = grace_s});
            }));
            return PoolServer::Handle(started.release());
          },
          py::kw_only(), py::arg("bind"), py::arg("advertised"), py::arg("data_bind"), py::arg("data_advertised"),
          py::arg("controller"), py::arg("key_folder"), py::arg("about"), py::arg("name"), py::arg("arena_bytes"),
          py::arg("blob_bytes_max"), py::arg("patience_s"), py::arg("parent_pid"), py::arg("handover"),
          py::arg("powercap"), py::arg("exit_fd"), py::arg("grace_s"))
      .def_property_readonly("worker_id", &PoolServer::worker_id)
      .def_property_readonly("endpoint", [](const PoolServer& self) { return self.endpoint().text(); })
      .def_property_readonly("advertised", [](const PoolServer& self) { return self.advertised(); })
      .def_property_readonly("data_endpoint", [](const PoolServer& self) { return self.data_endpoint().text(); })
      .def_property_readonly("data_advertised", [](const PoolServer& self) { return self.data_advertised(); })
      .def_property_readonly("signal_fd", &PoolServer::signal_fd)
      .def("close", [](PoolServer& self) { unwrap(without_gil([&] { return self.close(), Result<void>(); })); });
}

using worker::BatchServer;
using worker::JobServer;
using worker::WarmChannel;

namespace {

struct JobOrder {
  uint64_t job;
  int fd;
  int error_fd;
  std::string log_name;
};

// Returns None once the server is gone.
py::object next_order(WarmChannel& channel) {
  auto next = without_gil([&] { return channel.next(); });
  if (!next && next.error().code == Errc::kClosed) return py::none();
  auto told = unwrap(std::move(next));
  if (const auto* end = std::get_if<WarmChannel::End>(&told)) return py::cast(*end);
  auto& order = std::get<WarmChannel::Order>(told);
  return py::cast(JobOrder{
      .job = order.job, .fd = order.channel.release(), .error_fd = order.errors.release(), .log_name = order.log_name});
}

}  // namespace

void bind_job_process(py::module_& module) {
  py::class_<JobOrder>(module, "JobOrder")
      .def_readonly("job", &JobOrder::job)
      .def_readonly("fd", &JobOrder::fd)
      .def_readonly("error_fd", &JobOrder::error_fd)
      .def_readonly("log_name", &JobOrder::log_name);
  py::class_<WarmChannel::End>(module, "JobEnd").def_readonly("job", &WarmChannel::End::job);
  py::class_<WarmChannel>(module, "WarmChannel")
      .def_static(
          "open", [](int fd) { return std::make_unique<WarmChannel>(FileDescriptor(fd)); }, py::arg("fd"))
      .def(
          "ready",
          [](WarmChannel& self, const std::string& about) {
            unwrap(self.ready(wire::kind_bit(wire::JobKind::kPython), about));
          },
          py::arg("about"))
      .def("next", &next_order)
      .def(
          "started", [](WarmChannel& self, uint64_t job, int pid) { unwrap(self.started(job, pid)); }, py::arg("job"),
          py::arg("pid"))
      .def("close_in_child", [](WarmChannel& self) {
        self.close_in_child();
        // If the warm process is killed, its channel signals this to the server only.
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      });
  // The C++ class has another base class before this one.
  py::class_<JobServer, BatchServer>(module, "JobServer", py::multiple_inheritance())
      .def_static(
          "open",
          [](int fd, uint64_t arena_bytes) { return std::make_unique<JobServer>(FileDescriptor(fd), arena_bytes); },
          py::arg("fd"), py::arg("arena_bytes"));
}

}  // namespace penstock::bindings
