// SPDX-License-Identifier: Apache-2.0
// Conditions on the sizes of a batch, evaluated for the Python inputs of a graph.

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/size_conditions.h"

namespace penstock::bindings {

namespace py = pybind11;

namespace {

using graph::SizeExpression;

// An integer, ("symbol", position), or an operator's name and its operands.
SizeExpression expression_of(const py::handle& given) {
  using Op = SizeExpression::Op;
  static const std::map<std::string, Op> kOperators{
      {"symbol", Op::kSymbol}, {"add", Op::kAdd}, {"mul", Op::kMul}, {"floordiv", Op::kFloorDiv},
      {"mod", Op::kMod},       {"max", Op::kMax}, {"min", Op::kMin}, {"eq", Op::kEq},
      {"ne", Op::kNe},         {"lt", Op::kLt},   {"le", Op::kLe},   {"gt", Op::kGt},
      {"ge", Op::kGe},         {"and", Op::kAnd}, {"or", Op::kOr},   {"not", Op::kNot}};
  if (!py::isinstance<py::tuple>(given)) return {.value = given.cast<int64_t>()};
  const auto parts = given.cast<py::tuple>();
  const auto name = parts[0].cast<std::string>();
  const auto found = kOperators.find(name);
  if (found == kOperators.end() || parts.size() < 2)
    throw py::value_error("a size is computed by " + name +
                          ", but must be computed by an operator of csrc/graph/size_conditions.h");
  SizeExpression expression{.op = found->second};
  if (expression.op == Op::kSymbol) {
    expression.value = parts[1].cast<int64_t>();
    return expression;
  }
  for (size_t place = 1; place < parts.size(); ++place) expression.operands.push_back(expression_of(parts[place]));
  return expression;
}

std::vector<SizeExpression> expressions_of(const py::sequence& given) {
  std::vector<SizeExpression> expressions;
  for (const py::handle& item : given) expressions.push_back(expression_of(item));
  return expressions;
}

// The conditions of one program on its inputs: tensors and integers, by position. Confined to one thread, under the
// GIL.
class InputConditions {
 public:
  using Unusual = std::function<bool(const std::vector<int64_t>&)>;

  InputConditions(std::vector<std::pair<size_t, int64_t>> symbols,
                  std::vector<std::tuple<size_t, int64_t, int64_t>> fixed_sizes,
                  std::vector<std::pair<size_t, int64_t>> fixed_ints, const py::sequence& guards,
                  const std::vector<std::pair<size_t, py::sequence>>& strides, std::optional<Unusual> unusual)
      : symbols_(std::move(symbols)),
        fixed_sizes_(std::move(fixed_sizes)),
        fixed_ints_(std::move(fixed_ints)),
        unusual_(std::move(unusual)),
        conditions_(expressions_of(guards), strides_of(strides)) {
    for (const auto& [input, _] : strides) strided_inputs_.push_back(input);
  }

  bool hold(const py::sequence& inputs) {
    for (const auto& [input, dim, size] : fixed_sizes_)
      if (tensor(inputs, input).size(dim) != size) return false;
    for (const auto& [input, value] : fixed_ints_)
      if (py::int_(inputs[input]).cast<int64_t>() != value) return false;
    std::vector<int64_t> sizes;
    sizes.reserve(symbols_.size());
    for (const auto& [input, dim] : symbols_) sizes.push_back(tensor(inputs, input).size(dim));
    const auto* strides = conditions_.strides_for(sizes, [&] { return !unusual_ || (*unusual_)(sizes); });
    if (strides == nullptr) return false;
    for (size_t place = 0; place < strided_inputs_.size(); ++place)
      if (tensor(inputs, strided_inputs_[place]).strides() != at::IntArrayRef((*strides)[place])) return false;
    return true;
  }

 private:
  static at::Tensor tensor(const py::sequence& inputs, size_t place) { return inputs[place].cast<at::Tensor>(); }

  static std::vector<std::vector<SizeExpression>> strides_of(
      const std::vector<std::pair<size_t, py::sequence>>& strides) {
    std::vector<std::vector<SizeExpression>> expressions;
    expressions.reserve(strides.size());
    for (const auto& [_, of_one] : strides) expressions.push_back(expressions_of(of_one));
    return expressions;
  }

  const std::vector<std::pair<size_t, int64_t>> symbols_;
  const std::vector<std::tuple<size_t, int64_t, int64_t>> fixed_sizes_;
  const std::vector<std::pair<size_t, int64_t>> fixed_ints_;
  const std::optional<Unusual> unusual_;
  graph::SizeConditions conditions_;
  std::vector<size_t> strided_inputs_;
};

}  // namespace

void bind_sizes(py::module_& module) {
  py::class_<InputConditions>(module, "InputConditions")
      .def(py::init<std::vector<std::pair<size_t, int64_t>>, std::vector<std::tuple<size_t, int64_t, int64_t>>,
                    std::vector<std::pair<size_t, int64_t>>, const py::sequence&,
                    const std::vector<std::pair<size_t, py::sequence>>&, std::optional<InputConditions::Unusual>>(),
           py::kw_only(), py::arg("symbols"), py::arg("fixed_sizes"), py::arg("fixed_ints"), py::arg("guards"),
           py::arg("strides"), py::arg("unusual"))
      .def("hold", &InputConditions::hold, py::arg("inputs"));
}

}  // namespace penstock::bindings
