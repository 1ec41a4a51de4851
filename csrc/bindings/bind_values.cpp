// SPDX-License-Identifier: Apache-2.0
// Standalone values as bytes, such as a dataset's state sent from a worker to the trainer: a plain nest in a packed
// record. The bytes are not trusted.
#include <algorithm>
#include <iterator>
#include <vector>

#include "bindings/plain_nest.h"
#include "bindings/python_nest.h"
#include "bindings/raise.h"
#include "loader/batch.h"
#include "wire/packed_record.h"
#include "worker/slab_writer.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

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

py::object decode_value(const py::bytes& value) {
  const auto view = static_cast<std::string_view>(value);
  const auto packed = wire::parse_packed_record(std::as_bytes(std::span(view)));
  if (!packed) raise_failure(packed.error());
  const auto [record, payload] = std::pair(packed.value().record, packed.value().payload);
  auto batch = loader::Batch::from_parts({}, {record.begin(), record.end()}, {payload.begin(), payload.end()},
                                         /*allow_pickle=*/false);
  if (!batch) raise_failure(batch.error());
  return decode_nest(batch.value()->frame().nest, batch.value()->tensors(), py::none());
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
