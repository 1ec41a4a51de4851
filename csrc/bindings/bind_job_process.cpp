// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/prctl.h>

#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "base/file_descriptor.h"
#include "bindings/raise.h"
#include "wire/reports.h"
#include "worker/job_server.h"
#include "worker/warm_channel.h"

namespace py = pybind11;

namespace penstock::bindings {

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
