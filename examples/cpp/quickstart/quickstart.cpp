// SPDX-License-Identifier: Apache-2.0
// Trains the model of examples/quickstart.py on its photographs, in C++. The losses are those of quickstart/losses.py, the
// same training in Python, to the bit.
//
//   quickstart FOLDER [EPOCHS] [WORKERS]      FOLDER has a folder of JPEG files for each class

#include <penstock/penstock.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "photographs.h"

namespace nn = torch::nn;

struct PhotographNetImpl : nn::Module {
  explicit PhotographNetImpl(int64_t class_count) {
    mean = register_buffer("mean", torch::tensor({0.485, 0.456, 0.406}).view({1, 3, 1, 1}));
    std = register_buffer("std", torch::tensor({0.229, 0.224, 0.225}).view({1, 3, 1, 1}));
    int64_t channels_in = 3;
    for (const int64_t channels : {16, 32, 64}) {
      features->push_back(nn::Conv2d(nn::Conv2dOptions(channels_in, channels, 3).stride(2).padding(1).bias(false)));
      features->push_back(nn::BatchNorm2d(channels));
      features->push_back(nn::ReLU());
      channels_in = channels;
    }
    features->push_back(nn::AdaptiveAvgPool2d(1));
    features->push_back(nn::Flatten());
    register_module("features", features);
    classifier = register_module("classifier", nn::Linear(channels_in, class_count));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x.to(torch::kFloat) / 255;
    x = (x - mean) / std;
    x = nn::functional::interpolate(x, nn::functional::InterpolateFuncOptions()
                                           .size(std::vector<int64_t>{96, 96})
                                           .mode(torch::kBilinear)
                                           .align_corners(false)
                                           .antialias(true));
    return classifier(features->forward(x));
  }

  torch::Tensor mean, std;
  nn::Sequential features;
  nn::Linear classifier{nullptr};
};
TORCH_MODULE(PhotographNet);

int train(const std::string& folder, int epochs, int64_t workers) {
  torch::set_num_threads(1);
  torch::manual_seed(0);
  PhotographNet model(16);
  penstock::DataLoader loader(Photographs(folder, 288),
                              {.batch_size = 32, .shuffle = true, .num_workers = workers, .drop_last = true});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const penstock::Batch& batch : loader) {
      const auto loss = nn::functional::cross_entropy(model(batch["image"]), batch["label"]);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      std::printf("%.9g\n", loss.item<float>());
    }
  }
  return 0;
}

int main(int argument_count, char** arguments) {
  if (argument_count < 2) return std::fprintf(stderr, "usage: quickstart FOLDER [EPOCHS] [WORKERS]\n"), 2;
  try {
    return train(arguments[1], argument_count > 2 ? std::stoi(arguments[2]) : 1,
                 argument_count > 3 ? std::stoi(arguments[3]) : 2);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
}
