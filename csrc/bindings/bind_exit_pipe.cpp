// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/exit_pipe.h"
#include "base/stray_processes.h"
#include "bindings/raise.h"

namespace py = pybind11;

namespace penstock::bindings {

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
