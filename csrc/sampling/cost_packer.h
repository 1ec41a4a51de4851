// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batches of samples whose costs differ: each within a budget, and those of one step alike for all ranks, so that no
// rank waits for another. A step takes the next samples of the order, shares them out by the rule "longest first, to
// the least loaded" (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17
// (1969), pages 416 to 429), fills what room is left with samples that follow soon, and exchanges samples between the
// most and the least loaded batch. What a step leaves over comes first in the next one, and the last two steps cost the
// same.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::sampling {

struct CostPackerOptions {
  double budget = 0;          // the most that a batch may cost
  size_t rank_count = 1;      // batches of a step
  size_t batch_size_max = 0;  // samples of a batch; 0: any number
};

// Packs what is left of one order, step by step. Thread-compatible.
class CostPacker {
 public:
  // `costs` are those of all samples, by index: positive and at most the budget. They must outlive the packer.
  CostPacker(std::span<const double> costs, std::vector<int64_t> order);

  // The batches of the next step, one a rank, with their samples in the order's sequence. Empty when nothing is left.
  // Some of its batches may be empty in the last step, where fewer samples than ranks are left.
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
  static double cost_of(const Load& load);  // added up in the sequence of its items
  CostPackerOptions for_next(CostPackerOptions options) const;
  void take(const std::vector<Load>& loads);

  std::span<const double> costs_;
  std::vector<int64_t> order_;
  size_t first_ = 0;  // what is left of the order begins here
  double left_cost_ = 0;
};

}  // namespace penstock::sampling
