// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packs samples of different costs into batches. Each batch is within a budget, and all ranks' batches of one step cost
// about the same, so that no rank waits for another. A step takes the next samples of the order, assigns them by the
// rule "longest first, to the least loaded" (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal
// on Applied Mathematics 17 (1969), pages 416 to 429), fills the remaining room with samples that follow soon, and
// exchanges samples between the most and the least loaded batch. Samples that a step leaves over are the first ones of
// the next step, and the last two steps cost the same.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::sampling {

struct CostPackerOptions {
  double budget = 0;          // the maximal cost of a batch
  size_t rank_count = 1;      // batches per step
  size_t batch_size_max = 0;  // samples per batch; 0: unlimited
};

// Packs the rest of one order, step by step. Thread-compatible.
class CostPacker {
 public:
  // `costs` has the cost of every sample, by index: positive and at most the budget. It must outlive the packer.
  CostPacker(std::span<const double> costs, std::vector<int64_t> order);

  // Returns the batches of the next step, one per rank, with their samples in the sequence of the order. Empty if no
  // samples are left. In the last step some batches may be empty, if fewer samples than ranks are left.
  std::vector<std::vector<int64_t>> next(const CostPackerOptions& asked);

  size_t left_count() const { return order_.size() - first_; }

 private:
  struct Item {
    size_t place;  // in the order
    double cost;
  };
  struct Load {
    double cost = 0;
    std::vector<Item> items{};
  };

  bool share_out(size_t count, const CostPackerOptions& options, std::vector<Load>& loads) const;
  void top_up(size_t count, const CostPackerOptions& options, std::vector<Load>& loads) const;
  static void even_out(const CostPackerOptions& options, std::vector<Load>& loads);
  static double cost_of(const Load& load);  // summed in the sequence of its items
  CostPackerOptions for_next(CostPackerOptions options) const;
  void take(const std::vector<Load>& loads);

  std::span<const double> costs_;
  std::vector<int64_t> order_;
  size_t first_ = 0;  // index of the first sample that is left in the order
  double left_cost_ = 0;
};

}  // namespace penstock::sampling
