// SPDX-License-Identifier: Apache-2.0
#include "capture/numbers.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "capture/number_ops.h"
#include "graph/size_ops.h"

namespace penstock::capture {
namespace {

namespace jit = torch::jit;

void compare_identity(ProgramValues& values, const jit::Node* node, bool is_same) {
  const Bound& a = values.lookup(node->inputs()[0]);
  const Bound& b = values.lookup(node->inputs()[1]);
  if (!a.is_none() && !b.is_none()) refuse(node, "compares identities of values");
  for (const Bound* bound : {&a, &b})
    if (values.builder().may_be_none(*bound)) {
      values.bind(node->output(), values.emit(node, "opaque::is", {bound->argument}));
      return;
    }
  values.bind(node->output(), Bound::of_number((a.is_none() && b.is_none()) == is_same));
}

bool combine_truths(ProgramValues& values, const jit::Node* node, bool is_and) {
  const auto* a = values.lookup(node->inputs()[0]).argument.get<bool>();
  const auto* b = values.lookup(node->inputs()[1]).argument.get<bool>();
  if (a == nullptr || b == nullptr) return false;
  values.bind(node->output(), Bound::of_argument({is_and ? *a && *b : *a || *b}));
  return true;
}

bool read_metadata(ProgramValues& values, const jit::Node* node, std::string_view kind) {
  const Bound of = values.lookup(node->inputs()[0]);
  if (kind == "aten::len") {
    if (const auto* text = of.argument.get<std::string>()) {
      values.bind(node->output(), Bound::of_number(static_cast<int64_t>(text->size())));
      return true;
    }
    if (const auto items = of.elements()) {
      values.bind(node->output(), Bound::of_argument({static_cast<int64_t>(items->size())}));
      return true;
    }
    if (node->input(0)->type()->kind() == c10::TypeKind::ListType) {
      values.bind(node->output(), values.emit(node, "list::length", {of.argument}));
      return true;
    }
  }
  if (node->input(0)->type()->kind() != c10::TypeKind::TensorType || of.is_number_tensor) return false;
  if (const auto rank = values.builder().rank_of(of); rank && kind == "aten::dim") {
    values.bind(node->output(), Bound::of_number(static_cast<int64_t>(*rank)));
    return true;
  }
  std::vector<graph::Argument> arguments{of.argument};
  std::string op;
  if (kind == "aten::size" && node->inputs().size() == 2) {
    op = "aten::sym_size.int";
    arguments.push_back(values.lookup(node->inputs()[1]).argument);
  } else if (kind == "aten::len") {
    op = "aten::sym_size.int";
    arguments.push_back({int64_t{0}});
  } else {
    op = kind == "aten::size"    ? "size::sizes"
         : kind == "aten::dim"   ? "size::rank"
         : kind == "aten::numel" ? "size::numel"
                                 : "size::dtype";
  }
  values.bind(node->output(), values.emit(node, op, std::move(arguments)));
  return true;
}

// Arithmetic on numbers. Computed at once if all operands are known.
bool read_arithmetic(ProgramValues& values, const jit::Node* node, std::string_view kind) {
  if (kind == "aten::IntImplicit" || kind == "aten::FloatImplicit" || kind == "aten::ScalarImplicit") {
    if (!values.lookup(node->input()).is_number_tensor) return false;
    Bound bound = values.lookup(node->input());
    bound.is_number_tensor = false;
    values.bind(node->output(), std::move(bound));
    return true;
  }
  const auto found =
      std::find_if(kNumberOps.begin(), kNumberOps.end(), [&](const NumberOp& op) { return op.torchscript == kind; });
  if (found == kNumberOps.end() || node->outputs().size() != 1) return false;
  const graph::SizeOp* op = graph::find_size_op(found->size_op);
  PENSTOCK_ASSERT(op != nullptr, found->size_op, " is in no table");
  bool has_number_tensor = false;
  bool reads_tensor = false;
  std::vector<Bound> operands = values.inputs_of(node);
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].kind != Bound::Kind::kArgument) return false;
    has_number_tensor = has_number_tensor || operands[i].is_number_tensor;
    const bool is_tensor =
        node->inputs()[i]->type()->kind() == c10::TypeKind::TensorType && !operands[i].is_number_tensor;
    if (!is_tensor && !operands[i].number() && operands[i].argument.get<graph::ValueRef>() == nullptr) return false;
    reads_tensor = reads_tensor || is_tensor;
  }
  const bool makes_number = node->output()->type()->kind() != c10::TypeKind::TensorType;
  if (reads_tensor) {
    // int(tensor) and similar calls: the host reads the tensor.
    if (!makes_number || operands.size() != 1 || op->arity != 1) return false;
    operands[0] = values.emit(node, "aten::item", {operands[0].argument});
  } else if (!makes_number && !has_number_tensor) {
    return false;
  }
  if (operands.size() == 3 && has_number_tensor && (kind == "aten::add" || kind == "aten::sub")) {
    const auto alpha = operands[2].number();
    if (!alpha || *alpha != graph::Number(int64_t{1})) refuse(node, "scales a size");
    operands.pop_back();
  }
  if (operands.size() != op->arity) return false;
  std::vector<graph::Number> numbers;
  std::vector<graph::Argument> arguments;
  for (const Bound& operand : operands) {
    if (const auto number = operand.number()) numbers.push_back(*number);
    arguments.push_back(operand.argument);
  }
  Bound result;
  if (numbers.size() == operands.size()) {
    const auto value = graph::evaluate_size_op(*op, numbers);
    if (!value) refuse(node, "cannot be computed: " + value.error().message);
    result = Bound::of_number(value.value());
  } else {
    result = values.emit(node, std::string(op->name), std::move(arguments));
  }
  result.is_number_tensor = !makes_number;
  values.bind(node->output(), std::move(result));
  return true;
}

}  // namespace

bool read_number(ProgramValues& values, const jit::Node* node) {
  const std::string_view kind = node->kind().toQualString();
  if (kind == "prim::NumToTensor") {
    Bound bound = values.lookup(node->input());
    bound.is_number_tensor = true;
    values.bind(node->output(), std::move(bound));
    return true;
  }
  if (kind == "aten::__is__" || kind == "aten::__isnot__") {
    compare_identity(values, node, kind == "aten::__is__");
    return true;
  }
  if (kind == "aten::__and__" || kind == "aten::__or__") return combine_truths(values, node, kind == "aten::__and__");
  if (kind == "aten::len" || kind == "aten::size" || kind == "aten::dim" || kind == "aten::numel" ||
      kind == "prim::dtype")
    return read_metadata(values, node, kind);
  return read_arithmetic(values, node, kind);
}

}  // namespace penstock::capture
