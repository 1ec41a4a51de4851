// SPDX-License-Identifier: Apache-2.0
// The Python module penstock._pool: the part of the pool commands that needs no torch. It does not link torch, so
// `penstock status` starts as fast as Python. CMakeLists.txt lists its sources, which are compiled without torch's
// headers.
#include <pybind11/pybind11.h>

#include "net/socket.h"

namespace penstock::bindings {

void bind_controller(pybind11::module_& module);
void bind_exit_pipe(pybind11::module_& module);
void bind_job_separation(pybind11::module_& module);
void bind_visits(pybind11::module_& module);

}  // namespace penstock::bindings

PYBIND11_MODULE(_pool, module) {
  module.doc() =
      "The native part of penstock that does not need torch: keys, controller, operator requests, worker exits, job "
      "isolation, records of visits.";
  module.def("zmq_version", &penstock::net::zmq_version);
  penstock::bindings::bind_controller(module);
  penstock::bindings::bind_exit_pipe(module);
  penstock::bindings::bind_job_separation(module);
  penstock::bindings::bind_visits(module);
}
