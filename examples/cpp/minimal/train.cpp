// SPDX-License-Identifier: Apache-2.0
// A LibTorch training loop with penstock's loader: a line fitted to noisy points.
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <iostream>

struct Point {
  at::Tensor x;
  at::Tensor y;
};
PENSTOCK_FIELDS(Point, x, y)

int main() {
  torch::manual_seed(0);
  auto points = penstock::make_dataset(1000, [](int64_t, penstock::Draws& draws) {
    const at::Tensor x = torch::rand({1}, draws.sample_generator());
    return Point{x, 3 * x + 1 + 0.01 * torch::randn({1}, draws.sample_generator())};
  });
  penstock::DataLoader loader(points, {.batch_size = 50, .shuffle = true, .num_workers = 2});

  torch::nn::Linear model(1, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (const penstock::Batch& batch : loader) {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
    }
  }
  std::cout << "y = " << model->weight.item<float>() << " x + " << model->bias.item<float>() << "\n";
}
