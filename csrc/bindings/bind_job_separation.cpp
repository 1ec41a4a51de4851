// SPDX-License-Identifier: Apache-2.0
// A worker's processes in Python: the separation of job processes from the machine, the exit pipe of a process, and the
// stray processes that it leaves.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/child_process.h"
#include "base/job_separation.h"
#include "bindings/raise.h"

namespace py = pybind11;

namespace penstock::bindings {

namespace {

JobSeparation::Hiding hiding_named(const std::string& name) {
  if (name == "mounts") return JobSeparation::Hiding::kMounts;
  if (name == "rules") return JobSeparation::Hiding::kRules;
  if (name.empty()) return JobSeparation::Hiding::kNone;
  throw py::value_error("hiding must be mounts, rules or empty, got " + name);
}

std::string name_of(JobSeparation::Hiding hiding) {
  switch (hiding) {
    case JobSeparation::Hiding::kMounts: return "mounts";
    case JobSeparation::Hiding::kRules: return "rules";
    case JobSeparation::Hiding::kNone: break;
  }
  return "";
}

JobSeparation::NoNetwork no_network_named(const std::string& name) {
  if (name == "namespace") return JobSeparation::NoNetwork::kNamespace;
  if (name == "filter") return JobSeparation::NoNetwork::kFilter;
  if (name.empty()) return JobSeparation::NoNetwork::kNone;
  throw py::value_error("no_network must be namespace, filter or empty, got " + name);
}

}  // namespace

void bind_job_separation(py::module_& module) {
  module.def("landlock_version", &landlock_version);
  py::class_<JobSeparation>(module, "JobSeparation")
      .def(py::init([](const std::string& hiding, std::vector<std::string> hidden, std::string private_tmp,
                       std::vector<std::string> kept, bool are_writes_bounded, std::vector<std::string> writable,
                       const std::string& no_network, bool has_loopback, std::optional<uint32_t> uid,
                       std::optional<uint64_t> data_bytes, std::optional<uint64_t> descriptor_count,
                       std::optional<uint64_t> process_count) {
             return JobSeparation{.hiding = hiding_named(hiding),
                                  .hidden = std::move(hidden),
                                  .private_tmp = std::move(private_tmp),
                                  .kept = std::move(kept),
                                  .are_writes_bounded = are_writes_bounded,
                                  .writable = std::move(writable),
                                  .no_network = no_network_named(no_network),
                                  .has_loopback = has_loopback,
                                  .uid = uid,
                                  .data_bytes = data_bytes,
                                  .descriptor_count = descriptor_count,
                                  .process_count = process_count};
           }),
           py::kw_only(), py::arg("hiding") = "", py::arg("hidden") = std::vector<std::string>(),
           py::arg("private_tmp") = "", py::arg("kept") = std::vector<std::string>(),
           py::arg("are_writes_bounded") = false, py::arg("writable") = std::vector<std::string>(),
           py::arg("no_network") = "", py::arg("has_loopback") = false, py::arg("uid") = py::none(),
           py::arg("data_bytes") = py::none(), py::arg("descriptor_count") = py::none(),
           py::arg("process_count") = py::none())
      .def("separate", [](const JobSeparation& self) { unwrap(separate_job(self)); })
      .def(
          "refusal",
          [](const JobSeparation& self, const std::vector<std::string>& needed) {
            const auto tried = without_gil([&] { return try_separation(self, needed); });
            return tried ? std::string() : tried.error().message;
          },
          py::arg("needed") = std::vector<std::string>());
  module.def(
      "choose_key_hiding",
      [](std::string folder, std::vector<std::string> needed, bool is_demanded, std::string way_to_demand,
         const std::function<std::string(const std::string&)>& refusal) {
        const KeyHiding chosen =
            choose_key_hiding({.folder = std::move(folder),
                               .needed = std::move(needed),
                               .is_demanded = is_demanded,
                               .way_to_demand = std::move(way_to_demand)},
                              [&](JobSeparation::Hiding hiding) { return refusal(name_of(hiding)); });
        return py::make_tuple(name_of(chosen.hiding), chosen.notice, chosen.trouble);
      },
      py::arg("folder"), py::kw_only(), py::arg("needed"), py::arg("is_demanded"), py::arg("way_to_demand"),
      py::arg("refusal"));
}

void bind_exit_pipe(py::module_& module) {
  module.def(
      "write_exit_line",
      [](int fd, const std::string& word, const std::string& text) {
        const auto known = exit_word_named(word);
        if (!known) throw py::value_error("an exit line must start with a word of the protocol, got " + word);
        write_exit_line(fd, *known, text);
      },
      py::arg("fd"), py::arg("word"), py::arg("text") = "");
  py::class_<ExitPipe>(module, "ExitPipe")
      .def_static("open", [] { return std::make_unique<ExitPipe>(unwrap(ExitPipe::open())); })
      .def_property_readonly("read_fd", &ExitPipe::read_fd)
      .def_property_readonly("write_fd", &ExitPipe::write_fd)
      .def("close_write", &ExitPipe::close_write)
      .def("read", &ExitPipe::read)
      .def_property_readonly("has_served", &ExitPipe::has_served)
      .def_property_readonly("left", &ExitPipe::left)
      .def_property_readonly("end",
                             [](const ExitPipe& self) {
                               const auto word = self.end();
                               return word ? std::optional(name_of(*word)) : std::nullopt;
                             })
      .def_property_readonly("text", [](const ExitPipe& self) {
        // The text may be truncated in the middle of a character.
        const std::string& text = self.text();
        return py::reinterpret_steal<py::str>(
            PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
      });
  py::class_<StrayProcesses>(module, "StrayProcesses")
      .def(py::init<>())
      .def(
          "end_all_but",
          [](StrayProcesses& self, const std::vector<pid_t>& own, double timeout_s) {
            const py::gil_scoped_release released;
            const auto timeout = std::chrono::duration<double>(timeout_s);
            return self.end_all_but(own, std::chrono::steady_clock::now() +
                                             std::chrono::duration_cast<std::chrono::steady_clock::duration>(timeout));
          },
          py::arg("own"), py::arg("timeout_s"));
}

}  // namespace penstock::bindings
