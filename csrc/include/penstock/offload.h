// SPDX-License-Identifier: Apache-2.0
#pragma once
// Offloading: the part of a scripted module that depends only on the batch runs where the batch is made.

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
    kAuto,     // by price: the cut with the shortest predicted step
    kMaximal,  // move every operator that can move
    kNone,     // move no operators
  };
  Cut cut = Cut::kAuto;
  // The trainer also computes the moved part of the first batch that workers have made it for, and of one in every
  // `verify_every` batches from then on, and compares the results bit for bit. At least 1.
  int64_t verify_every = 1000;
};

// The operators that run in the workers, the operators that stay, and the reasons. The texts are the same as in
// Python's `loader.plan`.
struct PENSTOCK_API Plan {
  struct Group {
    std::string label;     // the operator and its location in the source
    std::string reason;    // why it runs where it does
    double worker_s = 0;   // seconds per batch when it runs in a worker
    double trainer_s = 0;  // seconds per batch when it runs in the trainer; 0 for groups that cannot move
  };
  std::vector<Group> moved = {};
  std::vector<Group> kept = {};
  int64_t raw_bytes = 0;                  // in a batch as the dataset returns it
  int64_t boundary_bytes = 0;             // that are transferred with the cut
  std::vector<std::string> refused = {};  // why the whole module runs in the trainer, if it does

  // The plan as text, one line per group.
  std::string explain() const;
};

// A scripted module, part of which runs in the workers. It is called with a batch, which supplies the module's
// arguments:
//
//   a dict           each argument of the module's forward is the part of its name; other parts are ignored
//   a list or tuple  each argument is the part at its position, starting with the first
//   a single tensor  it is the first argument
//
// Arguments that the batch does not supply take their defaults; if one has no default, or a part has another type, the
// call throws kValue and names the argument. Results and gradients are bit-for-bit identical to the module's;
// parameters are shared with the module, which may also be called directly at any time. train() and eval() on the
// module take effect here too. The whole module runs for a batch of another loader, a batch that arrived before the
// cut, a batch whose tensors the program has written to, and every batch while autocast is enabled or the default dtype
// is not float.
//
// A torch::nn module has no readable graph. Move its preprocessing into a scripted module in front of it and offload
// that module: docs/how-to/cpp.md shows how.
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

  // The plan for calls like the last one. Before the first call, `refused` states that the module was not called yet.
  Plan plan() const;
  // The number of batches for which a worker's part was used.
  uint64_t used_count() const;

 private:
  friend struct OffloadAccess;
  class Impl;

  OffloadedModule();
  std::unique_ptr<Impl> impl_;
};

// Makes the workers of `loader` run a part of `module`, which is determined at the first call. Several modules may be
// offloaded to one loader. Throws kValue for invalid options.
PENSTOCK_API OffloadedModule offload(torch::jit::Module module, DataLoader& loader, OffloadOptions options = {});

}  // namespace penstock
