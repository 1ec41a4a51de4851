// SPDX-License-Identifier: Apache-2.0
// Trains a scripted module twice: as it is, and with the part that depends on the batch alone run by the loader's
// threads. The losses are the same to the bit.
//
//   offload MODEL.pt      a module that takes images (N, 3, H, W) of bytes and gives logits
#include <penstock/penstock.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <iostream>
#include <vector>

std::vector<float> train(const std::string& file, bool is_offloaded) {
  torch::jit::Module model = torch::jit::load(file);
  torch::manual_seed(0);
  auto images = penstock::make_dataset(320, [](int64_t index, penstock::Draws& draws) {
    return std::pair(torch::randint(0, 256, {3, 48, 48}, draws.sample_generator(), torch::kByte), index);
  });
  penstock::DataLoader loader(images, {.batch_size = 16, .shuffle = true, .num_workers = 2});
  auto offloaded = penstock::offload(model, loader, {.cut = penstock::OffloadOptions::Cut::kMaximal});
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 0.05);
  std::vector<float> losses;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const penstock::Batch& batch : loader) {
      const auto logits = is_offloaded ? offloaded(batch).toTensor() : model.forward({batch[0]}).toTensor();
      const auto loss = torch::nn::functional::cross_entropy(logits, batch[1] % logits.size(1));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<float>());
    }
  }
  if (is_offloaded) std::cout << offloaded.plan().explain() << offloaded.used_count() << " batches cut\n";
  return losses;
}

int main(int argument_count, char** arguments) {
  if (argument_count != 2) return std::cerr << "usage: offload MODEL.pt\n", 2;
  const auto whole = train(arguments[1], false);
  const bool is_same = train(arguments[1], true) == whole;
  std::cout << whole.size() << " steps, losses " << (is_same ? "identical" : "DIFFER") << "\n";
  return is_same ? 0 : 1;
}
