// SPDX-License-Identifier: Apache-2.0
#include "capture/values.h"

#include <tuple>
#include <utility>

#include "base/assert.h"

namespace penstock::capture {
namespace {

namespace jit = torch::jit;

void add_values(const Bound& bound, std::vector<graph::Argument>& operands) {
  if (const auto items = bound.elements()) {
    for (const Bound& item : *items) add_values(item, operands);
  } else if (bound.value() != nullptr) {
    operands.push_back(bound.argument);
  }
}

}  // namespace

std::string where(const jit::Node* node) {
  if (const auto place = node->sourceRange().file_line_col())
    return std::string(node->kind().toQualString()) + " at " + std::get<0>(*place) + ":" +
           std::to_string(std::get<1>(*place));
  return node->kind().toQualString();
}

[[noreturn]] void refuse(const jit::Node* node, const std::string& why) {
  throw Refusal{"the TorchScript program cannot be captured: " + where(node) + " " + why};
}

const Bound& ProgramValues::lookup(const jit::Value* value) const {
  const Bound* found = find(value);
  PENSTOCK_ASSERT(found != nullptr, "%", value->debugName(), " is read before it is created");
  return *found;
}

const Bound* ProgramValues::find(const jit::Value* value) const {
  const auto found = bounds_.find(value);
  return found == bounds_.end() ? nullptr : &found->second;
}

std::vector<Bound> ProgramValues::inputs_of(const jit::Node* node) const {
  std::vector<Bound> bounds;
  for (const jit::Value* input : node->inputs()) bounds.push_back(lookup(input));
  return bounds;
}

std::vector<graph::Argument> ProgramValues::of_graph(const std::vector<const jit::Value*>& values) const {
  std::vector<graph::Argument> operands;
  for (const jit::Value* value : values)
    if (const Bound* bound = find(value)) add_values(*bound, operands);
  return operands;
}

void ProgramValues::bind(const jit::Value* value, Bound bound) { bounds_[value] = std::move(bound); }

void ProgramValues::bind_call(const jit::Node* node, graph::Node call) {
  const auto results = builder_.append(std::move(call), node->outputs().size(), where(node));
  for (size_t i = 0; i < results.size(); ++i) bind(node->outputs()[i], results[i]);
}

Bound ProgramValues::emit(const jit::Node* node, std::string op, std::vector<graph::Argument> arguments) {
  return builder_.emit(std::move(op), std::move(arguments), where(node));
}

}  // namespace penstock::capture
