// SPDX-License-Identifier: Apache-2.0
#pragma once
// Offloading: the part of a scripted module that depends on the batch alone runs where the batch is made.

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/batch.h"
#include "penstock/data_loader.h"
#include "penstock/export.h"

namespace penstock {

struct OffloadOptions {
  enum class Cut : uint8_t {
    kAuto,     // by price: what makes a step shorter
    kMaximal,  // everything that may move
    kNone,     // nothing
  };
  Cut cut = Cut::kAuto;
  // The first batch that workers have made the moved part of, and one in so many from then on, is computed by the
  // trainer as well and compared, bit for bit. At least 1.
  int64_t verify_every = 1000;
};

// Which operators run in the workers, which stay and why. The texts are those of Python's `loader.plan`.
struct PENSTOCK_API Plan {
  struct Group {
    std::string label;     // the operator and its place in the source
    std::string reason;    // why it is where it is
    double worker_s = 0;   // seconds a batch where it runs in a worker
    double trainer_s = 0;  // seconds a batch where it runs in the trainer; 0 for groups that cannot move
  };
  std::vector<Group> moved = {};
  std::vector<Group> kept = {};
  int64_t raw_bytes = 0;                  // of a batch as the dataset gives it
  int64_t boundary_bytes = 0;             // of what crosses with the cut
  std::vector<std::string> refused = {};  // why the whole module runs in the trainer, where it does

  // As text, a line for each group.
  std::string explain() const;
};

// A scripted module of which workers run a part. It is called with a batch, as the module is called with the batch's
// parts:
//
//   a dict           each argument of the module's forward is the part of its name; other parts are left
//   a list or tuple  each argument is the part at its place, from the first on
//   a single tensor  it is the first argument
//
// Arguments that the batch does not give have their defaults; without one, or with a part of another type, a call
// throws kValue and names the argument. The results and the gradients are those of the module, to the bit; parameters
// are shared with it, and it may be called by itself at any time. train() and eval() of the module are heeded. These
// run through the whole module: a batch of another loader, one that came before the cut, one whose tensors the program
// has written to, and every batch while autocast is on or the default dtype is not float.
//
// A torch::nn module has no graph that could be read. Its pre-processing is moved into a scripted module in front of
// it, and that module is offloaded: docs/how-to/cpp.md shows how.
//
//   torch::jit::Module model = torch::jit::load("model.pt");
//   auto offloaded = penstock::offload(model, loader);
//   for (const penstock::Batch& batch : loader) {
//     auto loss = criterion(offloaded(batch).toTensor(), batch["label"]);
//
// Thread-compatible: for the trainer's thread. May outlive its loader.
class PENSTOCK_API OffloadedModule {
 public:
  ~OffloadedModule();
  OffloadedModule(OffloadedModule&&) noexcept;
  OffloadedModule& operator=(OffloadedModule&&) noexcept;

  // The module's result for the batch. Throws the module's exceptions.
  c10::IValue operator()(const Batch& batch) { return forward(batch); }
  c10::IValue forward(const Batch& batch);

  // The plan for calls like the last one. Before the first call it says so.
  Plan plan() const;
  // Batches of which a worker's part was used.
  uint64_t used_count() const;

 private:
  friend struct OffloadAccess;
  class Impl;

  OffloadedModule();
  std::unique_ptr<Impl> impl_;
};

// Has the workers of `loader` run a part of `module`, which is found at the first call. Several modules may be
// offloaded to a loader. Throws kValue for options without a meaning.
PENSTOCK_API OffloadedModule offload(torch::jit::Module module, DataLoader& loader, OffloadOptions options = {});

}  // namespace penstock
