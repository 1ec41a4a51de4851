// SPDX-License-Identifier: Apache-2.0
#pragma once
// Filters: a dataset of the samples that a predicate accepts, found by worker threads ahead of use. Python's
// penstock.filtered() selects in the same way; docs/how-to/filters.md describes it.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/dataset.h"
#include "penstock/export.h"
#include "penstock/value.h"

namespace penstock {

struct FilterOptions {
  // One item for each sample, which the predicate receives instead: lengths, labels, scores. No sample is read then.
  std::shared_ptr<Dataset> inputs = {};
  // The number of threads that evaluate samples. 0: the calling thread evaluates them.
  int64_t num_workers = 0;
  // A file of one bit per sample, of the same format as in Python. If it exists, only the samples that are evaluated
  // twice are evaluated, and compared with it; otherwise it is written. Empty: none.
  std::string cache = {};
  // Called with the numbers of evaluated and of all samples.
  std::function<void(int64_t, int64_t)> progress = {};
};

// The accepted samples of a dataset, in the dataset's order. A loader reads it like any dataset: its length is known,
// so batches are full and all ranks of a job have the same number of steps. A loader's state names the selection, and a
// loader with another one refuses it.
class PENSTOCK_API FilteredDataset final : public Dataset {
 public:
  // `indices` are the accepted samples of `dataset`, ascending. Programs call filtered().
  FilteredDataset(std::shared_ptr<Dataset> dataset, std::vector<int64_t> indices);
  ~FilteredDataset() override;

  int64_t size() const override { return static_cast<int64_t>(indices_->size()); }
  Value get(int64_t index, Draws& draws) override;
  std::optional<Value> get_batch(std::span<const int64_t> indices, Draws& draws) override;
  std::shared_ptr<Dataset> clone() const override;

  const std::vector<int64_t>& indices() const { return *indices_; }
  // 16 hexadecimal digits that differ for any other indices, the same as in Python.
  const std::string& selection() const { return selection_; }

 private:
  FilteredDataset(const FilteredDataset& other, std::shared_ptr<Dataset> dataset);

  std::shared_ptr<Dataset> dataset_;                     // shared with the program
  std::shared_ptr<const std::vector<int64_t>> indices_;  // shared with clones
  std::string selection_;
};

// Selects the samples of a dataset that a predicate accepts. Every sample is evaluated once before this returns, and at
// least 64 of them, or 1 % (at most 4096), twice. The predicate receives a sample as the dataset returns it, from
// Dataset::get(), is called by several threads at once, and must depend on the sample alone. Each rank of a job
// evaluates all samples, or reads the cache.
//
// Throws kValue if no sample is accepted, if the predicate throws or gives another answer than before, if the cache is
// of another dataset or predicate, and for invalid options. An exception of the dataset is thrown as by a loader.
//
//   auto kept = penstock::filtered(photographs, [](const penstock::Value& sample) {
//     return sample["image"].tensor().size(1) >= 224;
//   }, {.num_workers = 8, .cache = "large.idx"});
//   penstock::DataLoader loader(kept, {.batch_size = 64, .shuffle = true, .num_workers = 8});
PENSTOCK_API std::shared_ptr<FilteredDataset> filtered(std::shared_ptr<Dataset> dataset,
                                                       std::function<bool(const Value&)> predicate,
                                                       FilterOptions options = {});

}  // namespace penstock
