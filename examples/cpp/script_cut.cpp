// SPDX-License-Identifier: Apache-2.0
// Trains a TorchScript module without any Python, once as it is and once cut in two: a thread beside the trainer runs
// what follows from the batch alone. Both trainings have to be the same, to the bit.
//
//   build/cmake-*/examples/script_cut MODEL.pt      a module that takes images (N, 3, H, W) of bytes and gives logits

#include <torch/script.h>

#include <cstdio>
#include <future>

#include "runtime/script_cut.h"

using penstock::capture::ScriptCall;
using penstock::runtime::ScriptCut;

constexpr int kSteps = 20;

at::Tensor images(int step) {
  at::manual_seed(1000 + step);
  return at::randint(0, 256, {16, 3, 48, 48}, at::kByte);
}

// One step of gradient descent. Returns the loss.
at::Tensor descend(torch::jit::Module& module, const at::Tensor& logits) {
  const at::Tensor loss = at::cross_entropy_loss(logits, at::arange(logits.size(0)) % logits.size(1));
  loss.backward();
  const at::NoGradGuard no_grad;
  for (at::Tensor parameter : module.parameters())
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.05), parameter.mutable_grad().reset();
  return loss.detach();
}

int main(int argument_count, char** arguments) {
  if (argument_count != 2) return std::fprintf(stderr, "usage: script_cut MODEL.pt\n"), 2;
  torch::jit::setGraphExecutorOptimize(false);  // from its second run on, TorchScript may round otherwise
  torch::jit::Module whole = torch::jit::load(arguments[1]);
  torch::jit::Module module = torch::jit::load(arguments[1]);

  auto made = ScriptCut::make(module, {{images(0)}}, {.mode = penstock::graph::CutMode::kMaximal});
  if (!made) return std::fprintf(stderr, "%s\n", made.error().message.c_str()), 1;
  const ScriptCut cut = std::move(made).value();
  for (const auto& group : cut.plan().moved) std::printf("beside  %s\n", group.label.c_str());
  for (const auto& group : cut.plan().kept) std::printf("trainer %s: %s\n", group.label.c_str(), group.reason.c_str());

  const auto prepare = [&cut](at::Tensor batch) { return cut.run_prefix(std::vector{batch}); };
  auto ahead = std::async(std::launch::async, prepare, images(0));
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor batch = images(step);
    const auto boundary = ahead.get();
    if (!boundary) return std::fprintf(stderr, "%s\n", boundary.error().message.c_str()), 1;
    ahead = std::async(std::launch::async, prepare, images(step + 1));
    at::manual_seed(step);
    const at::Tensor ours = descend(module, cut.run_suffix({{batch}}, boundary.value()).toTensor());
    at::manual_seed(step);
    const at::Tensor theirs = descend(whole, whole.forward({batch}).toTensor());
    if (!at::equal(ours, theirs)) return std::printf("step %d differs\n", step), 1;
  }
  const auto ours = module.parameters(), theirs = whole.parameters();
  for (auto a = ours.begin(), b = theirs.begin(); a != ours.end(); ++a, ++b)
    if (!at::equal(*a, *b)) return std::printf("a parameter differs\n"), 1;
  std::printf("%zu operators moved; %d steps, losses and parameters identical\n", cut.plan().moved.size(), kSteps);
}
