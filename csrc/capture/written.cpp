// SPDX-License-Identifier: Apache-2.0
#include "capture/written.h"

#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <unordered_set>

#include "base/assert.h"

namespace penstock::capture {

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

}  // namespace penstock::capture
