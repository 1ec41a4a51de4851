// SPDX-License-Identifier: Apache-2.0
// Batches of a plug-in from the workers of a pool, which come and go while the program runs:
//
//   penstock controller --bind tcp://127.0.0.1:7000
//   penstock-worker --controller tcp://127.0.0.1:7000 --processes 2
//   pool libsquares.so tcp://127.0.0.1:7000
//
// Without an address two processes of this machine make the same batches.
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

int main(int argument_count, char** arguments) {
  if (argument_count < 2) return std::cerr << "usage: pool PLUGIN [CONTROLLER]\n", 2;
  try {
    torch::manual_seed(0);
    const penstock::PluginDataset squares{.path = std::filesystem::absolute(arguments[1]),
                                          .name = "squares",
                                          .arguments = penstock::Value::dict({{"size", 1000}, {"noise", 0.1}})};
    penstock::Options options{.batch_size = 50, .shuffle = true};
    if (argument_count > 2)
      options.pool = arguments[2];
    else
      options.num_workers = 2;
    penstock::DataLoader loader(squares, options);
    double sum = 0;
    for (const penstock::Batch& batch : loader) sum += batch[1].sum().item<double>();
    std::cout << *loader.size() << " batches, sum " << sum << "\n";
  } catch (const penstock::Error& error) {
    return std::cerr << error.what() << "\n", 1;
  }
}
