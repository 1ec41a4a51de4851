// SPDX-License-Identifier: Apache-2.0
// TorchScript to the IR. The program is inlined and freed of the mutations that torch can prove harmless; what is left
// is read top to bottom, computing what is known now (attributes, flags, branches on them) and emitting nodes for the
// rest. Branches and loops that only the running program can decide become one node each, which stays.

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
#include "graph/capture_attributes.h"
#include "graph/capture_bound.h"
#include "graph/capture_builder.h"
#include "graph/capture_control_flow.h"
#include "graph/capture_number_ops.h"
#include "graph/capture_read.h"
#include "graph/capture_schema.h"
#include "graph/capture_types.h"
#include "graph/capture_written.h"
#include "graph/size_ops.h"

namespace penstock::graph {
namespace {

namespace jit = torch::jit;

constexpr int64_t kUnrollMax = 256;
constexpr int kCallDepthMax = 64;

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
  Reader(std::span<const at::Tensor> tensors, std::span<const std::optional<uint32_t>> leaf_indices,
         const jit::Graph& program)
      : builder_(tensors, leaf_indices), program_(program), written_(program) {}

  // `arguments` are those of forward; without them, all are tensors of the batch.
  Captured read(const jit::Module* self, const std::vector<c10::IValue>* arguments) {
    const size_t first = self == nullptr ? 0 : 1;
    for (size_t i = 0; i < program_.inputs().size(); ++i) {
      const jit::Value* input = program_.inputs()[i];
      if (i < first)
        bind(input, Bound::of_object(self->_ivalue(), "self"));
      else if (arguments != nullptr && !holds_tensors(arguments->at(i - first)))
        bind(input, builder_.known(arguments->at(i - first), input->debugName()));
      else
        bind(input, builder_.leaf(input->type(), input->debugName()));
      name(input);
    }
    read_block(program_.block());
    for (const jit::Value* output : program_.outputs()) builder_.add_output(lookup(output));
    written_.finish(program_);
    return builder_.finish();
  }

  WrittenProgram& written() { return written_; }
  ReadAttributes& attributes() { return attributes_; }

 private:
  void bind(const jit::Value* value, Bound bound) { bounds_[value] = std::move(bound); }

  const Bound& lookup(const jit::Value* value) const {
    const auto found = bounds_.find(value);
    PENSTOCK_ASSERT(found != bounds_.end(), "%", value->debugName(), " is read before it is made");
    return found->second;
  }

  void name(const jit::Value* value) {
    if (const ValueRef* ref = lookup(value).value()) written_.name(ref->id, value);
  }

  void read_block(const jit::Block* block) {
    for (const jit::Node* node : block->nodes()) {
      const std::string_view kind = node->kind().toQualString();
      if (kind == "prim::If" && has_known_branch(node)) {
        read_if(node);
        continue;
      }
      if (kind == "prim::Loop" && has_known_count(node)) {
        read_loop(node);
        continue;
      }
      read_node(node);
      written_.append(node);
      for (const jit::Value* output : node->outputs()) name(output);
    }
  }

  void read_node(const jit::Node* node) {
    const std::string_view kind = node->kind().toQualString();
    if (kind == "prim::If" || kind == "prim::Loop") return keep_whole(node);
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
    const std::string path = owner.path + "." + name;
    bind(node->output(), builder_.known(attributes_.read(owner.object, name), path));
  }

  void bind_number_tensor(const jit::Node* node) {
    Bound bound = lookup(node->input());
    bound.is_number_tensor = true;
    bind(node->output(), std::move(bound));
  }

  bool has_known_branch(const jit::Node* node) const { return lookup(node->input()).argument.get<bool>() != nullptr; }

  bool has_known_count(const jit::Node* node) const {
    const auto* trip_count = lookup(node->inputs()[0]).argument.get<int64_t>();
    const auto* goes_on = lookup(node->inputs()[1]).argument.get<bool>();
    return trip_count != nullptr && goes_on != nullptr && (!*goes_on || *trip_count <= kUnrollMax);
  }

  void read_if(const jit::Node* node) {
    const jit::Block* block = node->blocks()[*lookup(node->input()).argument.get<bool>() ? 0 : 1];
    read_block(block);
    for (size_t i = 0; i < node->outputs().size(); ++i) pass(node->outputs()[i], block->outputs()[i]);
  }

  void pass(const jit::Value* value, const jit::Value* from) {
    bind(value, Bound(lookup(from)));
    written_.stand_in(value, from);
  }

  // A loop whose count is known is written out. TorchScript keeps the condition to go on as a value of the body.
  void read_loop(const jit::Node* node) {
    const int64_t trip_count = *lookup(node->inputs()[0]).argument.get<int64_t>();
    const jit::Block* body = node->blocks()[0];
    std::vector<const jit::Value*> carried(node->inputs().begin() + 2, node->inputs().end());
    const jit::Value* go_on = node->inputs()[1];
    for (int64_t trip = 0;; ++trip) {
      const auto* goes_on = lookup(go_on).argument.get<bool>();
      if (goes_on == nullptr)
        refuse(node, "goes on as long as the running program says, after a first time that is known");
      if (trip >= trip_count || !*goes_on) break;
      bind(body->inputs()[0], Bound::of_argument({trip}));
      written_.stand_in(body->inputs()[0], trip);
      // All are read before any is written: a body may swap them.
      std::vector<Bound> bounds;
      for (const jit::Value* value : carried) bounds.push_back(lookup(value));
      written_.stand_in_all({body->inputs().begin() + 1, body->inputs().end()}, carried);
      for (size_t i = 0; i < carried.size(); ++i) bind(body->inputs()[i + 1], bounds[i]);
      read_block(body);
      go_on = body->outputs()[0];
      carried.assign(body->outputs().begin() + 1, body->outputs().end());
    }
    for (size_t i = 0; i < carried.size(); ++i) pass(node->outputs()[i], carried[i]);
  }

  // Control flow that only the running program can decide: one node that takes all that is read inside of it.
  void keep_whole(const jit::Node* node) {
    const ControlFlow flow = read_control_flow(node);
    if (!flow.refusal.empty()) refuse(flow.refused, flow.refusal);
    for (const jit::Node* attribute : flow.attributes) {
      if (!bounds_.contains(attribute->input())) refuse(attribute, "reads an attribute of what is known only later");
      bind_attribute(attribute);
    }
    std::vector<Argument> operands;
    for (const jit::Value* value : flow.reads)
      if (const auto found = bounds_.find(value); found != bounds_.end()) add_values(found->second, operands);
    Node call;
    call.op = std::string(flow.writes ? "torchscript::" : "opaque_view::") +
              (node->kind() == c10::prim::If ? "branch" : "loop");
    call.args = std::move(operands);
    const auto results = builder_.append(std::move(call), node->outputs().size(), where(node));
    for (size_t i = 0; i < results.size(); ++i) bind(node->outputs()[i], results[i]);
  }

  static void add_values(const Bound& bound, std::vector<Argument>& operands) {
    if (const auto items = bound.elements()) {
      for (const Bound& item : *items) add_values(item, operands);
    } else if (bound.value() != nullptr) {
      operands.push_back(bound.argument);
    }
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
    for (const Bound* bound : {&a, &b})
      if (builder_.may_be_none(*bound)) {
        bind(node->output(), emit(node, "opaque::is", {bound->argument}));
        return;
      }
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
      if (const auto* text = of.argument.get<std::string>()) {
        bind(node->output(), Bound::of_number(static_cast<int64_t>(text->size())));
        return true;
      }
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
    if (!handle) return keep_call(node, op);
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

  // What TorchScript computes by itself, such as lists from lists, stays as it is.
  void keep_call(const jit::Node* node, const std::string& op) {
    const ControlFlow flow = read_control_flow(node);
    if (flow.writes || !flow.refusal.empty() || node->hasSideEffects())
      refuse(node, "(" + op + ") is not an operator that the dispatcher has");
    std::vector<Argument> operands;
    for (const jit::Value* value : node->inputs()) add_values(lookup(value), operands);
    Node call;
    call.op = "opaque_view::" + std::string(node->kind().toUnqualString());
    call.args = std::move(operands);
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
  const jit::Graph& program_;
  WrittenProgram written_;
  ReadAttributes attributes_;
  std::unordered_map<const jit::Value*, Bound> bounds_;
};

bool has_calls(const jit::Block* block) {
  for (const jit::Node* node : block->nodes()) {
    if (node->kind() == c10::prim::CallMethod || node->kind() == c10::prim::CallFunction) return true;
    for (const jit::Block* nested : node->blocks())
      if (has_calls(nested)) return true;
  }
  return false;
}

// What is read has all calls inlined, and none of the writes that torch can prove harmless.
std::shared_ptr<jit::Graph> prepared(jit::Graph& original) {
  std::shared_ptr<jit::Graph> program = original.copy();
  // While the user has the optimizer turned off, torch inlines one level of calls at a time.
  for (int level = 0; level < kCallDepthMax && has_calls(program->block()); ++level) jit::Inline(*program);
  jit::RemoveListMutation(program);
  jit::RemoveTensorMutation(program);
  jit::ConstantPropagation(program);
  jit::EliminateDeadCode(program);
  return program;
}

// Runs `read` and turns what it throws into an Error.
template <typename Read>
auto refusing(const Read& read) -> Result<decltype(read())> {
  try {
    return read();
  } catch (const Refusal& refusal) {
    return Error{Errc::kUnsupported, refusal.message};
  } catch (const c10::Error& error) {
    return Error{Errc::kUnsupported,
                 std::string("the TorchScript program cannot be captured: ") + error.what_without_backtrace()};
  }
}

Result<Captured> capture(jit::Graph& original, const jit::Module* self, std::span<const at::Tensor> leaves) {
  return refusing([&] {
    const auto program = prepared(original);
    std::vector<std::optional<uint32_t>> leaf_indices(leaves.size());
    for (uint32_t i = 0; i < leaves.size(); ++i) leaf_indices[i] = i;
    return Reader(leaves, leaf_indices, *program).read(self, nullptr);
  });
}

}  // namespace

Result<ReadProgram> read_program(jit::Graph& original, const jit::Module* self, const ScriptCall& call,
                                 std::span<const std::optional<uint32_t>> leaf_indices) {
  return refusing([&] {
    const auto program = prepared(original);
    const std::vector<at::Tensor> tensors = call.tensors();
    Reader reader(tensors, leaf_indices, *program);
    Captured captured = reader.read(self, &call.arguments);
    return ReadProgram{std::move(captured), std::move(reader.written()), std::move(reader.attributes())};
  });
}

Result<Captured> capture_torchscript(const torch::jit::Module& module, std::span<const at::Tensor> leaves) {
  const auto method = module.find_method("forward");
  if (!method) return Error{Errc::kUnsupported, "the TorchScript module has no forward"};
  return capture(*method->graph(), &module, leaves);
}

Result<Captured> capture_torchscript(torch::jit::Function& function, std::span<const at::Tensor> leaves) {
  if (!function.isGraphFunction()) return Error{Errc::kUnsupported, "the TorchScript function has no program"};
  return capture(*jit::toGraphFunction(function).graph(), nullptr, leaves);
}

}  // namespace penstock::graph
