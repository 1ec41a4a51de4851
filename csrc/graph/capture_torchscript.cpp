// SPDX-License-Identifier: Apache-2.0
// TorchScript to the IR. The program is inlined and freed of the mutations that torch can prove harmless; what is left
// is read top to bottom, computing what is known now (attributes, flags, branches on them) and emitting nodes for the
// rest.

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/remove_mutation.h>

#include <algorithm>
#include <unordered_map>

#include "base/assert.h"
#include "graph/capture.h"
#include "graph/capture_bound.h"
#include "graph/capture_builder.h"
#include "graph/capture_number_ops.h"
#include "graph/capture_schema.h"
#include "graph/capture_types.h"
#include "graph/size_ops.h"

namespace penstock::graph {
namespace {

namespace jit = torch::jit;

constexpr int64_t kUnrollMax = 256;

std::string where(const jit::Node* node) {
  if (const auto place = node->sourceRange().file_line_col())
    return std::string(node->kind().toQualString()) + " at " + std::get<0>(*place) + ":" +
           std::to_string(std::get<1>(*place));
  return node->kind().toQualString();
}

[[noreturn]] void refuse(const jit::Node* node, const std::string& why) {
  throw Refusal{"the TorchScript program cannot be captured: " + where(node) + " " + why};
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->containedType(0) : type;
}

class Reader {
 public:
  explicit Reader(std::span<const at::Tensor> leaves) : builder_(leaves) {}

  Captured read(const jit::Graph& program, const jit::Module* self) {
    for (size_t i = 0; i < program.inputs().size(); ++i) {
      const jit::Value* input = program.inputs()[i];
      if (i == 0 && self != nullptr)
        bind(input, Bound::of_object(self->_ivalue(), "self"));
      else
        bind(input, builder_.leaf(input->type(), input->debugName()));
    }
    read_block(program.block());
    for (const jit::Value* output : program.outputs()) builder_.add_output(lookup(output));
    return builder_.finish();
  }

 private:
  void bind(const jit::Value* value, Bound bound) { bounds_[value] = std::move(bound); }

  const Bound& lookup(const jit::Value* value) const {
    const auto found = bounds_.find(value);
    PENSTOCK_ASSERT(found != bounds_.end(), "%", value->debugName(), " is read before it is made");
    return found->second;
  }

  void read_block(const jit::Block* block) {
    for (const jit::Node* node : block->nodes()) read_node(node);
  }

  void read_node(const jit::Node* node) {
    const std::string_view kind = node->kind().toQualString();
    if (kind == "prim::If") return read_if(node);
    if (kind == "prim::Loop") return read_loop(node);
    if (kind == "prim::Constant") return bind_constant(node);
    if (kind == "prim::GetAttr") return bind_attribute(node);
    if (kind == "prim::TupleUnpack" || kind == "prim::ListUnpack") return unpack(node);
    if (kind == "prim::TupleConstruct" || kind == "prim::DictConstruct")
      return bind(node->output(), Bound::of_tuple(inputs_of(node)));
    if (kind == "prim::ListConstruct") return bind(node->output(), Bound::of_list(inputs_of(node)));
    if (kind == "prim::TupleIndex" || kind == "aten::__getitem__") return index(node);
    if (kind == "prim::NumToTensor") return bind_number_tensor(node);
    if (kind == "prim::Uninitialized")  // stands for what a branch that was not taken would give
      return bind(node->output(), Bound::of_object(c10::IValue(), where(node)));
    if (kind == "prim::unchecked_cast") return bind(node->output(), lookup(node->input()));
    if (kind == "aten::__is__" || kind == "aten::__isnot__") return compare_identity(node, kind == "aten::__is__");
    if (kind == "aten::__and__" || kind == "aten::__or__") {
      if (combine_truths(node, kind == "aten::__and__")) return;
    }
    if (kind == "aten::len" || kind == "aten::size" || kind == "aten::dim" || kind == "aten::numel" ||
        kind == "prim::dtype") {
      if (read_metadata(node, kind)) return;
    }
    if (kind == "prim::device" && builder_.find_leaf(lookup(node->input())) != nullptr)
      return bind(node->output(), Bound::of_argument({Device{"cpu", {}}}));
    if (read_number_op(node, kind)) return;
    read_operator(node);
  }

  std::vector<Bound> inputs_of(const jit::Node* node) const {
    std::vector<Bound> bounds;
    for (const jit::Value* input : node->inputs()) bounds.push_back(lookup(input));
    return bounds;
  }

  void bind_constant(const jit::Node* node) {
    const auto value = jit::toIValue(node->output());
    if (!value)
      return bind(node->output(), Bound::of_object(c10::IValue(), where(node)));  // a function; calls were inlined
    bind(node->output(), builder_.known(*value, "the constant of " + where(node)));
  }

  void bind_attribute(const jit::Node* node) {
    const Bound& owner = lookup(node->input());
    const std::string& name = node->s(c10::Symbol::attr("name"));
    if (owner.kind != Bound::Kind::kObject || !owner.object.isObject()) refuse(node, "reads " + name + " of no module");
    bind(node->output(), builder_.known(owner.object.toObjectRef().getAttr(name), owner.path + "." + name));
  }

  void bind_number_tensor(const jit::Node* node) {
    Bound bound = lookup(node->input());
    bound.is_number_tensor = true;
    bind(node->output(), std::move(bound));
  }

  void read_if(const jit::Node* node) {
    const auto* condition = lookup(node->input()).argument.get<bool>();
    if (condition == nullptr) refuse(node, "branches on a value that is known only when the program runs");
    const jit::Block* block = node->blocks()[*condition ? 0 : 1];
    read_block(block);
    for (size_t i = 0; i < node->outputs().size(); ++i) bind(node->outputs()[i], Bound(lookup(block->outputs()[i])));
  }

  // A loop whose count is known is written out. TorchScript keeps the condition to go on as a value of the body.
  void read_loop(const jit::Node* node) {
    const auto* trip_count = lookup(node->inputs()[0]).argument.get<int64_t>();
    const jit::Block* body = node->blocks()[0];
    std::vector<Bound> carried;
    for (size_t i = 2; i < node->inputs().size(); ++i) carried.push_back(lookup(node->inputs()[i]));
    Bound go_on = lookup(node->inputs()[1]);
    for (int64_t trip = 0;; ++trip) {
      const auto* goes_on = go_on.argument.get<bool>();
      if (trip_count == nullptr || goes_on == nullptr)
        refuse(node, "loops a number of times that is known only when the program runs");
      if (trip >= *trip_count || !*goes_on) break;
      if (trip >= kUnrollMax) refuse(node, "loops more than " + std::to_string(kUnrollMax) + " times");
      bind(body->inputs()[0], Bound::of_argument({trip}));
      for (size_t i = 0; i < carried.size(); ++i) bind(body->inputs()[i + 1], carried[i]);
      read_block(body);
      go_on = lookup(body->outputs()[0]);
      for (size_t i = 0; i < carried.size(); ++i) carried[i] = lookup(body->outputs()[i + 1]);
    }
    for (size_t i = 0; i < carried.size(); ++i) bind(node->outputs()[i], carried[i]);
  }

  void unpack(const jit::Node* node) {
    const Bound from = lookup(node->input());
    if (const auto items = from.elements()) {
      if (items->size() != node->outputs().size()) refuse(node, "unpacks another number of values than there are");
      for (size_t i = 0; i < items->size(); ++i) bind(node->outputs()[i], (*items)[i]);
      return;
    }
    for (size_t i = 0; i < node->outputs().size(); ++i)
      bind(node->outputs()[i], emit(node, "list::get", {from.argument, Argument{static_cast<int64_t>(i)}}));
  }

  void index(const jit::Node* node) {
    const Bound from = lookup(node->inputs()[0]);
    const Bound at = lookup(node->inputs()[1]);
    const auto items = from.elements();
    const auto* position = at.argument.get<int64_t>();
    if (items && position != nullptr) {
      const auto place = list_position(*position, items->size());
      if (!place) refuse(node, "reads past the end of a list");
      return bind(node->output(), (*items)[*place]);
    }
    if (from.kind != Bound::Kind::kArgument || at.kind != Bound::Kind::kArgument ||
        node->inputs()[0]->type()->kind() != c10::TypeKind::ListType)
      refuse(node, "indexes what is neither a tuple nor a list");
    bind(node->output(), emit(node, "list::get", {from.argument, at.argument}));
  }

  void compare_identity(const jit::Node* node, bool is_same) {
    const Bound& a = lookup(node->inputs()[0]);
    const Bound& b = lookup(node->inputs()[1]);
    if (!a.is_none() && !b.is_none()) refuse(node, "compares identities of values");
    bind(node->output(), Bound::of_number((a.is_none() && b.is_none()) == is_same));
  }

  bool combine_truths(const jit::Node* node, bool is_and) {
    const auto* a = lookup(node->inputs()[0]).argument.get<bool>();
    const auto* b = lookup(node->inputs()[1]).argument.get<bool>();
    if (a == nullptr || b == nullptr) return false;
    bind(node->output(), Bound::of_argument({is_and ? *a && *b : *a || *b}));
    return true;
  }

  bool read_metadata(const jit::Node* node, std::string_view kind) {
    const Bound of = lookup(node->inputs()[0]);
    if (kind == "aten::len") {
      if (const auto items = of.elements()) {
        bind(node->output(), Bound::of_argument({static_cast<int64_t>(items->size())}));
        return true;
      }
      if (node->input(0)->type()->kind() == c10::TypeKind::ListType) {
        bind(node->output(), emit(node, "list::length", {of.argument}));
        return true;
      }
    }
    if (node->input(0)->type()->kind() != c10::TypeKind::TensorType || of.is_number_tensor) return false;
    if (const Input* leaf = builder_.find_leaf(of); leaf != nullptr && kind == "aten::dim") {
      bind(node->output(), Bound::of_number(static_cast<int64_t>(leaf->sizes.size())));
      return true;
    }
    std::vector<Argument> arguments{of.argument};
    std::string op;
    if (kind == "aten::size" && node->inputs().size() == 2) {
      op = "aten::sym_size.int";
      arguments.push_back(lookup(node->inputs()[1]).argument);
    } else if (kind == "aten::len") {
      op = "aten::sym_size.int";
      arguments.push_back({int64_t{0}});
    } else {
      op = kind == "aten::size"    ? "size::sizes"
           : kind == "aten::dim"   ? "size::rank"
           : kind == "aten::numel" ? "size::numel"
                                   : "size::dtype";
    }
    bind(node->output(), emit(node, op, std::move(arguments)));
    return true;
  }

  // Arithmetic on numbers. Done at once where all of them are known.
  bool read_number_op(const jit::Node* node, std::string_view kind) {
    if (kind == "aten::IntImplicit" || kind == "aten::FloatImplicit" || kind == "aten::ScalarImplicit") {
      if (!lookup(node->input()).is_number_tensor) return false;
      Bound bound = lookup(node->input());
      bound.is_number_tensor = false;
      bind(node->output(), std::move(bound));
      return true;
    }
    const auto found =
        std::find_if(kNumberOps.begin(), kNumberOps.end(), [&](const NumberOp& op) { return op.torchscript == kind; });
    if (found == kNumberOps.end() || node->outputs().size() != 1) return false;
    const SizeOp* op = find_size_op(found->size_op);
    PENSTOCK_ASSERT(op != nullptr, found->size_op, " is in no table");
    bool has_number_tensor = false;
    bool reads_tensor = false;
    std::vector<Bound> operands = inputs_of(node);
    for (size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].kind != Bound::Kind::kArgument) return false;
      has_number_tensor = has_number_tensor || operands[i].is_number_tensor;
      const bool is_tensor =
          node->inputs()[i]->type()->kind() == c10::TypeKind::TensorType && !operands[i].is_number_tensor;
      if (!is_tensor && !operands[i].number() && operands[i].argument.get<ValueRef>() == nullptr) return false;
      reads_tensor = reads_tensor || is_tensor;
    }
    const bool makes_number = node->output()->type()->kind() != c10::TypeKind::TensorType;
    if (reads_tensor) {
      // int(tensor) and its like: the host reads the tensor.
      if (!makes_number || operands.size() != 1 || op->arity != 1) return false;
      operands[0] = emit(node, "aten::item", {operands[0].argument});
    } else if (!makes_number && !has_number_tensor) {
      return false;
    }
    if (operands.size() == 3 && has_number_tensor && (kind == "aten::add" || kind == "aten::sub")) {
      const auto alpha = operands[2].number();
      if (!alpha || *alpha != Number(int64_t{1})) refuse(node, "scales a size");
      operands.pop_back();
    }
    if (operands.size() != op->arity) return false;
    std::vector<Number> numbers;
    std::vector<Argument> arguments;
    for (const Bound& operand : operands) {
      if (const auto number = operand.number()) numbers.push_back(*number);
      arguments.push_back(operand.argument);
    }
    Bound result;
    if (numbers.size() == operands.size()) {
      const auto value = evaluate_size_op(*op, numbers);
      if (!value) refuse(node, "cannot be computed: " + value.error().message);
      result = Bound::of_number(value.value());
    } else {
      result = emit(node, std::string(op->name), std::move(arguments));
    }
    result.is_number_tensor = !makes_number;
    bind(node->output(), std::move(result));
    return true;
  }

  void read_operator(const jit::Node* node) {
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (schema == nullptr) refuse(node, "is not an operator that can be captured");
    std::string op = schema->name() + (schema->overload_name().empty() ? "" : "." + schema->overload_name());
    if (op == "aten::to.prim_dtype") op = "aten::to.dtype";
    const auto handle = find_operator(op);
    if (!handle) refuse(node, "(" + op + ") is not an operator that the dispatcher has");
    const auto& parameters = handle->schema().arguments();
    if (node->inputs().size() > parameters.size()) refuse(node, "has other arguments than " + op);
    Node call;
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      const Bound& bound = lookup(node->inputs()[i]);
      if (bound.is_number_tensor) refuse(node, "computes with a size held in a tensor");
      Argument argument = bound.argument;
      if (bound.kind != Bound::Kind::kArgument)
        refuse(node, "takes " + parameters[i].name() + ", which is no tensor, number or list of them");
      if (parameters[i].name() == "generator" && argument.get<None>() == nullptr) refuse(node, "takes a generator");
      argument = typed(std::move(argument), parameters[i], node);
      if (parameters[i].kwarg_only())
        call.kwargs.push_back({parameters[i].name(), std::move(argument)});
      else
        call.args.push_back(std::move(argument));
    }
    call.op = std::move(op);
    const auto results = builder_.append(std::move(call), node->outputs().size(), where(node));
    for (size_t i = 0; i < results.size(); ++i) bind(node->outputs()[i], results[i]);
  }

  // TorchScript writes dtypes, layouts and memory formats as integers; the operator's schema tells which is which.
  static Argument typed(Argument argument, const c10::Argument& parameter, const jit::Node* node) {
    const auto* number = argument.get<int64_t>();
    if (number == nullptr) return argument;
    std::optional<Argument> named;
    switch (without_optional(parameter.real_type())->kind()) {
      case c10::TypeKind::ScalarTypeType:
        if (const auto dtype = dtype_from_torch(static_cast<c10::ScalarType>(*number))) named = Argument{*dtype};
        break;
      case c10::TypeKind::LayoutType:
        if (const auto layout = from_torch<Layout>(kTorchLayouts, static_cast<c10::Layout>(*number)))
          named = Argument{*layout};
        break;
      case c10::TypeKind::MemoryFormatType:
        if (const auto format = from_torch<MemoryFormat>(kTorchMemoryFormats, static_cast<c10::MemoryFormat>(*number)))
          named = Argument{*format};
        break;
      default: return argument;
    }
    if (!named)
      refuse(node, "takes " + parameter.name() + "=" + std::to_string(*number) + ", which the graph has no name for");
    return *named;
  }

  Bound emit(const jit::Node* node, std::string op, std::vector<Argument> arguments) {
    return builder_.emit(std::move(op), std::move(arguments), where(node));
  }

  CaptureBuilder builder_;
  std::unordered_map<const jit::Value*, Bound> bounds_;
};

Result<Captured> capture(const std::shared_ptr<jit::Graph>& original, const jit::Module* self,
                         std::span<const at::Tensor> leaves) {
  try {
    std::shared_ptr<jit::Graph> program = original->copy();
    jit::Inline(*program);
    jit::RemoveListMutation(program);
    jit::RemoveTensorMutation(program);
    jit::ConstantPropagation(program);
    jit::EliminateDeadCode(program);
    return Reader(leaves).read(*program, self);
  } catch (const Refusal& refusal) {
    return Error{Errc::kUnsupported, refusal.message};
  } catch (const c10::Error& error) {
    return Error{Errc::kUnsupported,
                 std::string("the TorchScript program cannot be captured: ") + error.what_without_backtrace()};
  }
}

}  // namespace

Result<Captured> capture_torchscript(const torch::jit::Module& module, std::span<const at::Tensor> leaves) {
  const auto method = module.find_method("forward");
  if (!method) return Error{Errc::kUnsupported, "the TorchScript module has no forward"};
  return capture(method->graph(), &module, leaves);
}

Result<Captured> capture_torchscript(torch::jit::Function& function, std::span<const at::Tensor> leaves) {
  if (!function.isGraphFunction()) return Error{Errc::kUnsupported, "the TorchScript function has no program"};
  return capture(jit::toGraphFunction(function).graph(), nullptr, leaves);
}

}  // namespace penstock::graph
