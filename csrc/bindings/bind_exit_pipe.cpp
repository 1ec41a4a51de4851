// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "base/exit_pipe.h"
#include "bindings/raise.h"

namespace py = pybind11;

namespace penstock::bindings {

void bind_exit_pipe(py::module_& module) {
  module.def(
      "write_exit_line",
      [](int fd, const std::string& word, const std::string& text) {
        const auto known = exit_word_named(word);
        if (!known) throw py::value_error("an exit line must begin with a word of the protocol, got " + word);
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
        // Cut off in the middle of a letter, perhaps.
        const std::string& text = self.text();
        return py::reinterpret_steal<py::str>(
            PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
      });
}

}  // namespace penstock::bindings
