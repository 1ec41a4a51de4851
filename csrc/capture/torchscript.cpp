// SPDX-License-Identifier: Apache-2.0
#include "capture/torchscript.h"

#include <ATen/core/List.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/remove_mutation.h>

#include <algorithm>
#include <unordered_set>

#include "base/result.h"
#include "capture/builder.h"
#include "capture/calls.h"
#include "capture/capture.h"
#include "graph/size_ops.h"

namespace penstock::capture {
namespace {

c10::IValue snapshot(const c10::IValue& value) {
  if (!value.isList()) return value;
  c10::List<c10::IValue> copy = value.toList().copy();
  for (size_t i = 0; i < copy.size(); ++i) copy.set(i, snapshot(copy.get(i)));
  return copy;
}

bool are_same(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), is_same_value);
}

}  // namespace

bool is_same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isTensor()) return a.toTensor().is_same(b.toTensor());
  if (a.isList()) return are_same(a.toList().vec(), b.toList().vec());
  if (a.isTuple()) return are_same(a.toTupleRef().elements().vec(), b.toTupleRef().elements().vec());
  if (a.isDouble()) return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
  if (a.isInt() || a.isBool() || a.isString() || a.isNone() || a.isDevice() || a.isComplexDouble()) return a == b;
  return a.is(b);
}

c10::IValue ReadAttributes::read(const c10::IValue& owner, const std::string& name) {
  c10::IValue value = owner.toObjectRef().getAttr(name);
  attributes_.push_back({owner, name, snapshot(value)});
  return value;
}

bool ReadAttributes::hold() const {
  return std::all_of(attributes_.begin(), attributes_.end(), [](const Attribute& attribute) {
    return is_same_value(attribute.owner.toObjectRef().getAttr(attribute.name), attribute.value);
  });
}

namespace jit = torch::jit;

std::string place_of(const jit::Node* node) {
  std::string place = std::string(node->kind().toQualString()) + " at ";
  if (const auto line = node->sourceRange().file_line_col())
    place += std::get<0>(*line) + ":" + std::to_string(std::get<1>(*line)) + ":" + std::to_string(std::get<2>(*line));
  return place;
}

std::string line_of(const std::string& place) { return place.substr(place.find(" at ")); }

WrittenProgram::WrittenProgram(const jit::Graph& program) : written_(std::make_shared<jit::Graph>()) {
  for (const jit::Value* input : program.inputs()) {
    jit::Value* copy = written_->addInput();
    copy->copyMetadata(const_cast<jit::Value*>(input));  // only read; torch's signature lacks the const
    copies_[input] = copy;
  }
}

jit::Value* WrittenProgram::copy_of(const jit::Value* value) const {
  const auto found = copies_.find(value);
  PENSTOCK_ASSERT(found != copies_.end(), "%", value->debugName(), " is read before it is written");
  return found->second;
}

void WrittenProgram::append(const jit::Node* node) {
  auto* original = const_cast<jit::Node*>(node);  // only read; torch's signature lacks the const
  jit::Node* copy = written_->createClone(original, [this](jit::Value* value) { return copy_of(value); });
  written_->appendNode(copy);
  for (size_t i = 0; i < node->outputs().size(); ++i) copies_[node->outputs()[i]] = copy->outputs()[i];
}

void WrittenProgram::stand_in(const jit::Value* value, const jit::Value* other) { copies_[value] = copy_of(other); }

void WrittenProgram::stand_in(const jit::Value* value, int64_t number) {
  copies_[value] = written_->insertConstant(number);
}

void WrittenProgram::stand_in_all(const std::vector<const jit::Value*>& values,
                                  const std::vector<const jit::Value*>& others) {
  std::vector<jit::Value*> copies;
  copies.reserve(others.size());
  for (const jit::Value* other : others) copies.push_back(copy_of(other));
  for (size_t i = 0; i < values.size(); ++i) copies_[values[i]] = copies[i];
}

void WrittenProgram::name(graph::ValueId id, const jit::Value* value) { named_.try_emplace(id, copy_of(value)); }

void WrittenProgram::finish(const jit::Graph& program) {
  for (const jit::Value* output : program.outputs()) written_->registerOutput(copy_of(output));
}

std::shared_ptr<jit::Graph> WrittenProgram::duplicate(ValueMap& values) const {
  std::shared_ptr<jit::Graph> twin = written_->copy();
  for (size_t i = 0; i < written_->inputs().size(); ++i) values[written_->inputs()[i]] = twin->inputs()[i];
  auto theirs = twin->nodes().begin();
  for (const jit::Node* node : written_->nodes()) {
    for (size_t i = 0; i < node->outputs().size(); ++i) values[node->outputs()[i]] = (*theirs)->outputs()[i];
    ++theirs;
  }
  return twin;
}

Result<std::vector<jit::Value*>> WrittenProgram::find(const std::vector<graph::ValueId>& ids,
                                                      const ValueMap& values) const {
  std::vector<jit::Value*> found;
  for (const graph::ValueId id : ids) {
    const auto named = named_.find(id);
    if (named == named_.end())
      return Fault{Errc::kUnsupported, "value " + std::to_string(id) + " of the graph is not a value of the program"};
    found.push_back(values.at(named->second));
  }
  return found;
}

Result<std::shared_ptr<jit::Graph>> WrittenProgram::without(const std::vector<graph::ValueId>& values,
                                                            const std::vector<graph::ValueId>& gone) const {
  ValueMap places;
  std::shared_ptr<jit::Graph> part = duplicate(places);
  const auto boundary = find(values, places);
  if (!boundary) return boundary.error();
  std::unordered_set<const jit::Node*> unwanted;
  for (const graph::ValueId id : gone)
    if (const auto named = named_.find(id); named != named_.end()) unwanted.insert(places.at(named->second)->node());
  for (size_t i = 0; i < boundary.value().size(); ++i) {
    jit::Value* argument = part->addInput("boundary_" + std::to_string(i));
    boundary.value()[i]->replaceAllUsesWith(argument);
  }
  jit::EliminateDeadCode(part);
  for (const jit::Node* node : part->nodes())
    if (unwanted.contains(node))
      return Fault{Errc::kUnsupported, place_of(node) + " would be needed on both sides of the cut"};
  part->lint();
  return part;
}

std::set<std::string> WrittenProgram::lines(const std::vector<graph::ValueId>& values) const {
  std::set<std::string> lines;
  for (const graph::ValueId id : values)
    if (const auto named = named_.find(id); named != named_.end())
      lines.insert(line_of(place_of(named->second->node())));
  return lines;
}

std::set<std::string> WrittenProgram::lines() const {
  std::set<std::string> lines;
  for (const jit::Node* node : written_->nodes()) lines.insert(line_of(place_of(node)));
  return lines;
}

Result<std::shared_ptr<jit::Graph>> WrittenProgram::computing(const std::vector<graph::ValueId>& values) const {
  ValueMap places;
  std::shared_ptr<jit::Graph> part = duplicate(places);
  const auto wanted = find(values, places);
  if (!wanted) return wanted.error();
  while (!part->outputs().empty()) part->eraseOutput(part->outputs().size() - 1);
  jit::Node* tuple = part->appendNode(part->createTuple(wanted.value()));
  part->registerOutput(tuple->output());
  // A node that moves does not write, so the needed nodes follow from the reads alone. The others have no readers.
  std::unordered_set<const jit::Node*> needed;
  std::vector<const jit::Node*> stack{tuple};
  while (!stack.empty()) {
    const jit::Node* node = stack.back();
    stack.pop_back();
    if (!needed.insert(node).second) continue;
    for (const jit::Value* input : node->inputs()) stack.push_back(input->node());
  }
  for (auto node = part->nodes().rbegin(); node != part->nodes().rend(); ++node)
    if (!needed.contains(*node)) node.destroyCurrent();
  part->lint();
  return part;
}

namespace {

namespace jit = torch::jit;

constexpr int64_t kUnrollMax = 256;
constexpr int kCallDepthMax = 64;

// Reads a prepared program from top to bottom, into a graph and a written-out program.
class Reader {
 public:
  Reader(std::span<const at::Tensor> tensors, std::span<const std::optional<uint32_t>> leaf_indices,
         const jit::Graph& program)
      : values_(tensors, leaf_indices), program_(program), written_(program) {}

  // `arguments` are forward's; without them, all are tensors of the batch.
  Captured read(const jit::Module* self, const std::vector<c10::IValue>* arguments) {
    const size_t first = self == nullptr ? 0 : 1;
    for (size_t i = 0; i < program_.inputs().size(); ++i) {
      const jit::Value* input = program_.inputs()[i];
      if (i < first)
        values_.bind(input, Bound::of_object(self->_ivalue(), "self"));
      else if (arguments != nullptr && !holds_tensors(arguments->at(i - first)))
        values_.bind(input, values_.builder().known(arguments->at(i - first), input->debugName()));
      else
        values_.bind(input, values_.builder().leaf(input->type(), input->debugName()));
      name(input);
    }
    read_block(program_.block());
    for (const jit::Value* output : program_.outputs()) values_.builder().add_output(values_.lookup(output));
    written_.finish(program_);
    return values_.builder().finish();
  }

  WrittenProgram& written() { return written_; }
  ReadAttributes& attributes() { return attributes_; }

 private:
  void name(const jit::Value* value) {
    if (const graph::ValueRef* ref = values_.lookup(value).value()) written_.name(ref->id, value);
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
      return values_.bind(node->output(), Bound::of_tuple(values_.inputs_of(node)));
    if (kind == "prim::ListConstruct") return values_.bind(node->output(), Bound::of_list(values_.inputs_of(node)));
    if (kind == "prim::TupleIndex" || kind == "aten::__getitem__") return index(node);
    if (kind == "prim::Uninitialized")  // the result of a branch that was not taken
      return values_.bind(node->output(), Bound::of_object(c10::IValue(), where(node)));
    if (kind == "prim::unchecked_cast") return values_.bind(node->output(), values_.lookup(node->input()));
    if (kind == "prim::device")
      if (const auto device = values_.builder().device_of(values_.lookup(node->input())))
        return values_.bind(node->output(), Bound::of_argument({*device}));
    if (!read_number(values_, node)) read_call(values_, node);
  }

  void bind_constant(const jit::Node* node) {
    const auto value = jit::toIValue(node->output());
    if (!value)  // a function; calls were inlined
      return values_.bind(node->output(), Bound::of_object(c10::IValue(), where(node)));
    values_.bind(node->output(), values_.builder().known(*value, "the constant of " + where(node)));
  }

  void bind_attribute(const jit::Node* node) {
    const Bound& owner = values_.lookup(node->input());
    const std::string& name = node->s(c10::Symbol::attr("name"));
    if (owner.kind != Bound::Kind::kObject || !owner.object.isObject())
      refuse(node, "reads " + name + " of a value that is not a module");
    const std::string path = owner.path + "." + name;
    values_.bind(node->output(), values_.builder().known(attributes_.read(owner.object, name), path));
  }

  bool has_known_branch(const jit::Node* node) const {
    return values_.lookup(node->input()).argument.get<bool>() != nullptr;
  }

  bool has_known_count(const jit::Node* node) const {
    const auto* trip_count = values_.lookup(node->inputs()[0]).argument.get<int64_t>();
    const auto* goes_on = values_.lookup(node->inputs()[1]).argument.get<bool>();
    return trip_count != nullptr && goes_on != nullptr && (!*goes_on || *trip_count <= kUnrollMax);
  }

  void read_if(const jit::Node* node) {
    const jit::Block* block = node->blocks()[*values_.lookup(node->input()).argument.get<bool>() ? 0 : 1];
    read_block(block);
    for (size_t i = 0; i < node->outputs().size(); ++i) pass(node->outputs()[i], block->outputs()[i]);
  }

  void pass(const jit::Value* value, const jit::Value* from) {
    values_.bind(value, Bound(values_.lookup(from)));
    written_.stand_in(value, from);
  }

  // A loop whose count is known is unrolled. TorchScript keeps the loop condition as a value of the body.
  void read_loop(const jit::Node* node) {
    const int64_t trip_count = *values_.lookup(node->inputs()[0]).argument.get<int64_t>();
    const jit::Block* body = node->blocks()[0];
    std::vector<const jit::Value*> carried(node->inputs().begin() + 2, node->inputs().end());
    const jit::Value* go_on = node->inputs()[1];
    for (int64_t trip = 0;; ++trip) {
      const auto* goes_on = values_.lookup(go_on).argument.get<bool>();
      if (goes_on == nullptr) refuse(node, "is a loop with a data-dependent condition after a known first iteration");
      if (trip >= trip_count || !*goes_on) break;
      values_.bind(body->inputs()[0], Bound::of_argument({trip}));
      written_.stand_in(body->inputs()[0], trip);
      // Read all before writing any: a body may swap them.
      std::vector<Bound> bounds;
      bounds.reserve(carried.size());
      for (const jit::Value* value : carried) bounds.push_back(values_.lookup(value));
      written_.stand_in_all({body->inputs().begin() + 1, body->inputs().end()}, carried);
      for (size_t i = 0; i < carried.size(); ++i) values_.bind(body->inputs()[i + 1], bounds[i]);
      read_block(body);
      go_on = body->outputs()[0];
      carried.assign(body->outputs().begin() + 1, body->outputs().end());
    }
    for (size_t i = 0; i < carried.size(); ++i) pass(node->outputs()[i], carried[i]);
  }

  // Control flow that can only be decided at run time becomes one node, which takes all values that are read inside it.
  void keep_whole(const jit::Node* node) {
    const ControlFlow flow = read_control_flow(node);
    if (!flow.refusal.empty()) refuse(flow.refused, flow.refusal);
    for (const jit::Node* attribute : flow.attributes) {
      if (values_.find(attribute->input()) == nullptr)
        refuse(attribute, "reads an attribute of a value that is not known during capture");
      bind_attribute(attribute);
    }
    graph::Node call;
    call.op = std::string(flow.writes ? "torchscript::" : "opaque_view::") +
              (node->kind() == c10::prim::If ? "branch" : "loop");
    call.args = values_.of_graph(flow.reads);
    values_.bind_call(node, std::move(call));
  }

  void unpack(const jit::Node* node) {
    const Bound from = values_.lookup(node->input());
    if (const auto items = from.elements()) {
      if (items->size() != node->outputs().size())
        refuse(node, "unpacks a number of values that differs from the length");
      for (size_t i = 0; i < items->size(); ++i) values_.bind(node->outputs()[i], (*items)[i]);
      return;
    }
    for (size_t i = 0; i < node->outputs().size(); ++i)
      values_.bind(node->outputs()[i],
                   values_.emit(node, "list::get", {from.argument, graph::Argument{static_cast<int64_t>(i)}}));
  }

  void index(const jit::Node* node) {
    const Bound from = values_.lookup(node->inputs()[0]);
    const Bound at = values_.lookup(node->inputs()[1]);
    const auto items = from.elements();
    const auto* position = at.argument.get<int64_t>();
    if (items && position != nullptr) {
      const auto place = graph::list_position(*position, items->size());
      if (!place) refuse(node, "reads past the end of a list");
      return values_.bind(node->output(), (*items)[*place]);
    }
    if (from.kind != Bound::Kind::kArgument || at.kind != Bound::Kind::kArgument ||
        node->inputs()[0]->type()->kind() != c10::TypeKind::ListType)
      refuse(node, "indexes a value that is neither a tuple nor a list");
    values_.bind(node->output(), values_.emit(node, "list::get", {from.argument, at.argument}));
  }

  ProgramValues values_;
  const jit::Graph& program_;
  WrittenProgram written_;
  ReadAttributes attributes_;
};

bool has_calls(const jit::Block* block) {
  for (const jit::Node* node : block->nodes()) {
    if (node->kind() == c10::prim::CallMethod || node->kind() == c10::prim::CallFunction) return true;
    for (const jit::Block* nested : node->blocks())
      if (has_calls(nested)) return true;
  }
  return false;
}

// Returns the program to read: all calls are inlined, and writes that torch can prove harmless are removed.
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

// Runs `read` and turns its exceptions into a Fault.
template <typename Read>
auto refusing(const Read& read) -> Result<decltype(read())> {
  try {
    return read();
  } catch (const Refusal& refusal) {
    return Fault{Errc::kUnsupported, refusal.message};
  } catch (const c10::Error& error) {
    return Fault{Errc::kUnsupported,
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
  if (!method) return Fault{Errc::kUnsupported, "the TorchScript module has no forward"};
  return capture(*method->graph(), &module, leaves);
}

Result<Captured> capture_torchscript(torch::jit::Function& function, std::span<const at::Tensor> leaves) {
  if (!function.isGraphFunction()) return Fault{Errc::kUnsupported, "the TorchScript function has no graph"};
  return capture(*jit::toGraphFunction(function).graph(), nullptr, leaves);
}

}  // namespace penstock::capture
