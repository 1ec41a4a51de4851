// SPDX-License-Identifier: Apache-2.0
#pragma once
// TorchScript's internal operators on numbers, which the dispatcher does not have, with the name of the equivalent
// size:: operator.

#include <array>
#include <string_view>

namespace penstock::capture {

struct NumberOp {
  std::string_view torchscript;  // without overload: each takes only ints, floats or bools
  std::string_view size_op;
};

inline constexpr std::array<NumberOp, 25> kNumberOps = {{{"aten::add", "size::add"},
                                                         {"aten::sub", "size::sub"},
                                                         {"aten::mul", "size::mul"},
                                                         {"aten::div", "size::truediv"},
                                                         {"aten::floordiv", "size::floordiv"},
                                                         {"aten::floor_divide", "size::floordiv"},
                                                         {"aten::remainder", "size::mod"},
                                                         {"aten::pow", "size::pow"},
                                                         {"prim::min", "size::min"},
                                                         {"prim::max", "size::max"},
                                                         {"aten::eq", "size::eq"},
                                                         {"aten::ne", "size::ne"},
                                                         {"aten::lt", "size::lt"},
                                                         {"aten::le", "size::le"},
                                                         {"aten::gt", "size::gt"},
                                                         {"aten::ge", "size::ge"},
                                                         {"aten::neg", "size::neg"},
                                                         {"prim::abs", "size::abs"},
                                                         {"aten::__not__", "size::not"},
                                                         {"aten::Int", "size::int"},
                                                         {"aten::Float", "size::float"},
                                                         {"aten::Bool", "size::bool"},
                                                         {"aten::floor", "size::floor"},
                                                         {"aten::ceil", "size::ceil"},
                                                         {"aten::sqrt", "size::sqrt"}}};

}  // namespace penstock::capture
