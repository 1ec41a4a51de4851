// SPDX-License-Identifier: Apache-2.0
// A plug-in with a dataset for worker processes: numbers and their squares, with some noise.
#include <penstock/penstock.h>
#include <torch/torch.h>

PENSTOCK_DATASET(squares, [](const penstock::Value& arguments) {
  const double noise = arguments["noise"].number();
  return penstock::make_dataset(arguments["size"].integer(), [noise](int64_t index, penstock::Draws& draws) {
    const at::Tensor x = torch::full({1}, 0.01 * static_cast<double>(index));
    return std::pair(x, x * x + noise * torch::randn({1}, draws.sample_generator()));
  });
})
