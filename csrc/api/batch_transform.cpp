// SPDX-License-Identifier: Apache-2.0
#include "api/batch_transform.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <string>

#include "api/module_call.h"
#include "penstock/error.h"

namespace penstock::api {
namespace {

const torch::jit::Node* find_draw(const torch::jit::Block& block) {
  for (const torch::jit::Node* node : block.nodes()) {
    if (node->isNondeterministic()) return node;
    for (const torch::jit::Block* inner : node->blocks())
      if (const torch::jit::Node* found = find_draw(*inner)) return found;
  }
  return nullptr;
}

}  // namespace

void check_draws_nothing(const torch::jit::Module& module) {
  const auto graph = module.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  const torch::jit::Node* draw = find_draw(*graph->block());
  if (draw == nullptr) return;
  throw Error(ErrorKind::kUnsupported,
              "Options::transform must not draw random numbers (" + std::string(draw->kind().toDisplayString()) +
                  "), because the threads of a process share one generator; draw them in the dataset with "
                  "Draws::sample_generator(), or call eval() if the module draws only in training");
}

Value BatchTransform::apply(const Value& batch) {
  const auto method = module_.get_method("forward");
  const c10::FunctionSchema& schema = method.function().getSchema();
  if (const size_t count = parts_left_over(schema, batch); count > 0) {
    throw Error(ErrorKind::kValue, "Options::transform must take every part of the batch, which is " +
                                       batch.describe() + ", and " + std::to_string(count) +
                                       " would be lost; let the module's forward take the whole batch and return it");
  }
  const torch::jit::GraphOptimizerEnabledGuard unoptimized(false);
  return value_of(module_.forward(arguments_of(schema, batch)));
}

}  // namespace penstock::api
