// SPDX-License-Identifier: Apache-2.0
// The Python module penstock._C: one bind_<room> per room, listed here or, for rooms that do not use torch, in
// pool_module.cpp.
#include <pybind11/pybind11.h>

namespace penstock::bindings {

void bind_graph(pybind11::module_& module);
void bind_repricing(pybind11::module_& module);
void bind_sizes(pybind11::module_& module);
void bind_script(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
void bind_image(pybind11::module_& module);
void bind_loader(pybind11::module_& module);
void bind_sampling(pybind11::module_& module);
void bind_cache(pybind11::module_& module);
void bind_tuning(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
void bind_worker(pybind11::module_& module);
void bind_values(pybind11::module_& module);
void bind_pool_worker(pybind11::module_& module);
void bind_job_process(pybind11::module_& module);
void bind_replica(pybind11::module_& module);

}  // namespace penstock::bindings

PYBIND11_MODULE(_C, module) {
  module.doc() = "The native part of penstock.";
  penstock::bindings::bind_graph(module);
  penstock::bindings::bind_repricing(module);
  penstock::bindings::bind_script(module);
  penstock::bindings::bind_sizes(module);
  penstock::bindings::bind_runtime(module);
  penstock::bindings::bind_image(module);
  penstock::bindings::bind_loader(module);
  penstock::bindings::bind_sampling(module);
  penstock::bindings::bind_cache(module);
  penstock::bindings::bind_tuning(module);
  penstock::bindings::bind_replica(module);
  penstock::bindings::bind_pool(module);
  penstock::bindings::bind_worker(module);
  penstock::bindings::bind_values(module);
  penstock::bindings::bind_pool_worker(module);
  penstock::bindings::bind_job_process(module);
}
