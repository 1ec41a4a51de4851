// SPDX-License-Identifier: Apache-2.0
#pragma once
// A scripted model that trains on batches of "image" and "label", by itself or offloaded.

#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <vector>

namespace penstock {

// The losses.
inline std::vector<float> train(torch::jit::Module model, DataLoader& loader, OffloadedModule* offloaded, int epochs) {
  std::vector<float> losses;
  torch::manual_seed(77);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const Batch& batch : loader) {
      const at::Tensor logits =
          offloaded != nullptr ? (*offloaded)(batch).toTensor() : model.forward({batch["image"]}).toTensor();
      const at::Tensor loss = torch::cross_entropy_loss(logits, batch["label"].to(logits.device()));
      loss.backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor parameter : model.parameters()) {
        parameter.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad().reset();
      }
      losses.push_back(loss.item<float>());
    }
  }
  return losses;
}

// That a call has the whole module's results, device and draws.
inline void expect_same_call(torch::jit::Module model, OffloadedModule& offloaded, const Batch& batch) {
  torch::manual_seed(batch.number());
  const at::Tensor ours = offloaded(batch).toTensor();
  const at::Tensor next = torch::rand({4});
  torch::manual_seed(batch.number());
  const at::Tensor theirs = model.forward({batch["image"]}).toTensor();
  EXPECT_EQ(ours.device(), theirs.device());
  EXPECT_TRUE(ours.cpu().equal(theirs.cpu())) << "batch " << batch.number();
  EXPECT_TRUE(next.equal(torch::rand({4}))) << "batch " << batch.number();
}

}  // namespace penstock
