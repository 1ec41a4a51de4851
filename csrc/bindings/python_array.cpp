// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_array.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/numpy.h>
#include <torch/csrc/utils/tensor_numpy.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "wire/frame.h"
#include "wire/nest.h"
#include "worker/stack.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

using TensorDtype = std::pair<std::string_view, at::ScalarType>;

// The dtypes that both numpy and torch have.
constexpr std::array<TensorDtype, 14> kTensorDtypes = {{{"|b1", at::kBool},
                                                        {"|i1", at::kChar},
                                                        {"|u1", at::kByte},
                                                        {"<i2", at::kShort},
                                                        {"<u2", at::kUInt16},
                                                        {"<i4", at::kInt},
                                                        {"<u4", at::kUInt32},
                                                        {"<i8", at::kLong},
                                                        {"<u8", at::kUInt64},
                                                        {"<f2", at::kHalf},
                                                        {"<f4", at::kFloat},
                                                        {"<f8", at::kDouble},
                                                        {"<c8", at::kComplexFloat},
                                                        {"<c16", at::kComplexDouble}}};

static_assert(std::ranges::all_of(kTensorDtypes, [](const TensorDtype& its) {
  return wire::is_numpy_dtype(static_cast<wire::DTypeCode>(its.second));
}));

py::object numpy_name(const char* name) { return py::module_::import("numpy").attr(name); }

[[noreturn]] void raise_malformed(std::string_view reason) {
  raise_failure(wire::malformed("an array in the nest of a batch", reason));
}

// The text form of a dtype whose elements are plain bytes, if numpy makes the same dtype from this text; else no value.
std::optional<std::string> plain_dtype(const py::object& dtype) {
  if (dtype.attr("hasobject").cast<bool>() || !dtype.attr("names").is_none()) return std::nullopt;
  auto text = dtype.attr("str").cast<std::string>();
  if (!wire::array_item_bytes(text)) return std::nullopt;
  if (!numpy_name("dtype")(text).equal(dtype)) return std::nullopt;
  return text;
}

bool has_clean_strides(const py::array& array) {
  if ((array.flags() & (py::array::c_style | py::array::f_style)) == 0) return false;
  // A dimension of one element may have any stride.
  return std::all_of(array.strides(), array.strides() + array.ndim(), [&](py::ssize_t stride) {
    return stride >= 0 && (array.itemsize() == 0 || stride % array.itemsize() == 0);
  });
}

// Whether text in numpy's format, four bytes per character, contains a character above `last`.
bool has_codes_above(const py::object& bytes, char order, uint32_t last) {
  const py::object codes = bytes.attr("view")(std::string{order, 'u', '4'});
  return codes.attr("__gt__")(last).attr("any")().cast<bool>();
}

at::Tensor view_of(const py::array& array, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  PyObject* const owner = array.inc_ref().ptr();
  const auto drop = [owner](void*) {
    const py::gil_scoped_acquire lock;
    Py_DECREF(owner);
  };
  // The bytes to be sent are only read.
  return at::from_blob(const_cast<void*>(array.data()), sizes, strides, drop, at::TensorOptions().dtype(type));
}

}  // namespace

bool is_exact_array(py::handle object) { return py::type::handle_of(object).is(numpy_name("ndarray")); }

bool is_array_scalar(py::handle object) { return py::isinstance(object, numpy_name("generic")); }

std::optional<ArrayParts> decompose_array(py::handle object) {
  auto array = py::reinterpret_borrow<py::array>(object);
  const auto dtype = plain_dtype(array.dtype());
  if (!dtype || array.itemsize() == 0) return std::nullopt;
  if (!has_clean_strides(array)) array = array.attr("copy")("C").cast<py::array>();
  const py::ssize_t item_bytes = array.itemsize();
  std::vector<int64_t> sizes(array.shape(), array.shape() + array.ndim());
  std::vector<int64_t> strides(array.strides(), array.strides() + array.ndim());
  const auto* const found = std::ranges::find(kTensorDtypes, std::string_view(*dtype), &TensorDtype::first);
  if (found != kTensorDtypes.end()) {
    for (int64_t& stride : strides) stride /= item_bytes;
    return ArrayParts{.tensor = view_of(array, sizes, strides, found->second), .dtype = {}};
  }
  if (sizes.size() >= wire::kDimCountMax) return std::nullopt;  // the element adds a dimension
  sizes.push_back(item_bytes);
  strides.push_back(1);
  return ArrayParts{.tensor = view_of(array, sizes, strides, at::kByte), .dtype = *dtype};
}

std::optional<ScalarParts> decompose_scalar(py::handle scalar) {
  const py::object dtype = scalar.attr("dtype");
  if (!py::type::handle_of(scalar).is(dtype.attr("type"))) return std::nullopt;
  auto text = plain_dtype(dtype);
  if (!text || text->front() == '>') return std::nullopt;
  auto element = scalar.attr("tobytes")().cast<std::string>();
  if (wire::array_item_bytes(*text) == 0) element.clear();  // numpy returns a zero for empty text
  return ScalarParts{.dtype = *std::move(text), .element = std::move(element)};
}

py::object make_array(const at::Tensor& tensor, std::string_view dtype) {
  const bool is_known =
      std::ranges::find(kTensorDtypes, tensor.scalar_type(), &TensorDtype::second) != kTensorDtypes.end();
  if (!is_known) raise_malformed("its tensor has a dtype that numpy does not support");
  if (!dtype.empty()) {
    const uint64_t item_bytes = wire::array_item_bytes(dtype).value_or(0);
    const bool has_elements = tensor.scalar_type() == at::kByte && tensor.dim() > 0 && tensor.stride(-1) == 1 &&
                              item_bytes > 0 && static_cast<uint64_t>(tensor.size(-1)) == item_bytes;
    if (!has_elements) raise_malformed("its tensor does not consist of elements of its dtype");
  }
  // A batch stage may have moved the batch's tensors to a device, which numpy arrays do not support.
  const at::Tensor on_host = tensor.is_cpu() ? tensor : tensor.cpu();
  auto array = py::reinterpret_steal<py::object>(torch::utils::tensor_to_numpy(on_host));
  if (!array) throw py::error_already_set();
  if (dtype.empty()) return array;
  try {
    // The highest character of Python. numpy does not check, and Python would report such an element as an internal
    // error.
    if (dtype[1] == 'U' && has_codes_above(array, dtype[0], 0x10ffff))
      raise_malformed("it contains text that is not Unicode");
    const py::object elements = array.attr("view")(numpy_name("dtype")(py::str(dtype.data(), dtype.size())));
    return elements[py::make_tuple(py::ellipsis(), 0)];
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
    raise_malformed("numpy cannot create it");
  }
}

py::object make_scalar(std::string_view dtype, std::string_view element) {
  const py::bytes bytes(element.data(), element.size());
  try {
    switch (dtype[1]) {
      // An array would strip trailing zeros.
      case 'U': return numpy_name("str_")(bytes.attr("decode")("utf-32-le", "surrogatepass"));
      case 'S': return numpy_name("bytes_")(bytes);
      case 'V': return numpy_name("void")(bytes);
      default: return numpy_name("frombuffer")(bytes, py::str(dtype.data(), dtype.size()))[py::int_(0)];
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
    raise_malformed("numpy cannot create the scalar");
  }
}

namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {{"bool", at::kBool},
                                                              {"int8", at::kChar},
                                                              {"uint8", at::kByte},
                                                              {"int16", at::kShort},
                                                              {"int32", at::kInt},
                                                              {"int64", at::kLong},
                                                              {"float16", at::kHalf},
                                                              {"float32", at::kFloat},
                                                              {"float64", at::kDouble},
                                                              {"complex64", at::kComplexFloat},
                                                              {"complex128", at::kComplexDouble}};

// numpy has a single object for each builtin dtype in native byte order.
std::optional<at::ScalarType> torch_dtype(const py::dtype& dtype) {
  const py::object make = py::module_::import("numpy").attr("dtype");
  for (const auto& [name, torch_type] : kDtypes) {
    if (make(name).is(dtype)) return torch_type;
  }
  return std::nullopt;
}

bool has_same_shape(const py::array& array, const py::array& first) {
  return array.ndim() == first.ndim() && std::equal(array.shape(), array.shape() + array.ndim(), first.shape());
}

// A dimension of one element may have any stride, and torch.as_tensor rejects some strides.
bool is_contiguous(const py::array& array) {
  return (array.flags() & py::array::c_style) != 0 &&
         std::all_of(array.strides(), array.strides() + array.ndim(),
                     [&](py::ssize_t stride) { return stride >= 0 && stride % array.itemsize() == 0; });
}

}  // namespace

bool is_array_row(PyObject* object) {
  const std::string_view name = Py_TYPE(object)->tp_name;
  if (name == "numpy.ndarray") return py::type::handle_of(object).is(py::module_::import("numpy").attr("ndarray"));
  return name == "memmap" && py::type::handle_of(object).is(py::module_::import("numpy").attr("memmap"));
}

at::Tensor stack_arrays(worker::SlabWriter& writer, std::span<PyObject* const> arrays) {
  const auto first = py::reinterpret_borrow<py::array>(arrays.front());
  const py::dtype dtype = first.dtype();
  const auto torch_type = torch_dtype(dtype);
  if (!torch_type) return {};
  bool is_read_only = false;
  std::vector<const void*> rows;
  rows.reserve(arrays.size());
  for (PyObject* object : arrays) {
    if (Py_TYPE(object) != Py_TYPE(arrays.front())) return {};
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (!array.dtype().is(dtype) || !is_contiguous(array) || !has_same_shape(array, first)) return {};
    is_read_only = is_read_only || !array.writeable();
    rows.push_back(array.data());
  }
  if (is_read_only) {
    const auto as_tensor = py::module_::import("torch").attr("as_tensor");
    const auto reads_only = [](PyObject* object) { return !py::reinterpret_borrow<py::array>(object).writeable(); };
    as_tensor(py::handle(*std::ranges::find_if(arrays, reads_only)));
  }
  const std::vector<int64_t> sizes(first.shape(), first.shape() + first.ndim());
  return worker::stack_rows(writer, rows, sizes, *torch_type);
}

}  // namespace penstock::bindings
