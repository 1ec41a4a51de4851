// SPDX-License-Identifier: Apache-2.0
#include "capture/control_flow.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace penstock::capture {
namespace {

namespace jit = torch::jit;

// TorchScript operations other than operator calls; none of them writes. An exception ends the call, and a repeated
// warning is shown once.
constexpr std::array<std::string_view, 21> kHarmless = {"prim::If",
                                                        "prim::Loop",
                                                        "prim::Constant",
                                                        "prim::GetAttr",
                                                        "prim::TupleConstruct",
                                                        "prim::TupleUnpack",
                                                        "prim::TupleIndex",
                                                        "prim::ListConstruct",
                                                        "prim::ListUnpack",
                                                        "prim::DictConstruct",
                                                        "prim::RaiseException",
                                                        "prim::Uninitialized",
                                                        "prim::unchecked_cast",
                                                        "prim::NumToTensor",
                                                        "prim::dtype",
                                                        "prim::device",
                                                        "prim::unchecked_unwrap_optional",
                                                        "aten::warn",
                                                        "aten::is_autocast_enabled",
                                                        "aten::is_autocast_cpu_enabled",
                                                        "aten::is_grad_enabled"};

bool is_tensor(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::OptionalType) return is_tensor(type->containedType(0));
  return type->kind() == c10::TypeKind::TensorType;
}

// Whether the call writes to a list or a dict: values that were read from it before would become invalid.
bool writes_to_a_container(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite() && !is_tensor(argument.real_type());
  });
}

class Walk {
 public:
  ControlFlow flow;

  void visit(const jit::Node* node) {
    const std::string_view kind = node->kind().toQualString();
    for (const jit::Value* input : node->inputs()) {
      flow.reads.push_back(input);
      if (input->type()->kind() == c10::TypeKind::ClassType && kind != "prim::GetAttr")
        refuse(node, "uses a module or an object inside data-dependent control flow");
    }
    if (kind == "prim::GetAttr") flow.attributes.push_back(node), flow.reads.push_back(node->output());
    if (std::find(kHarmless.begin(), kHarmless.end(), kind) == kHarmless.end()) visit_call(node);
    for (const jit::Block* block : node->blocks()) {
      for (const jit::Node* inner : block->nodes()) visit(inner);
      for (const jit::Value* output : block->outputs()) flow.reads.push_back(output);
    }
  }

 private:
  void visit_call(const jit::Node* node) {
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (schema == nullptr) return refuse(node, "is not an operator that is supported inside control flow");
    const bool is_torchs = schema->name().starts_with("aten::") || schema->name().starts_with("prim::");
    if (node->hasSideEffects() || !is_torchs) refuse(node, "has side effects inside data-dependent control flow");
    if (writes_to_a_container(*schema)) refuse(node, "writes to a list or a dict inside control flow");
    flow.writes = flow.writes || schema->is_mutable();
  }

  void refuse(const jit::Node* node, std::string why) {
    if (!flow.refusal.empty()) return;
    flow.refused = node;
    flow.refusal = std::move(why);
  }
};

}  // namespace

ControlFlow read_control_flow(const jit::Node* node) {
  Walk walk;
  walk.visit(node);
  return std::move(walk.flow);
}

}  // namespace penstock::capture
