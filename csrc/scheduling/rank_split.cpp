// SPDX-License-Identifier: Apache-2.0
#include "scheduling/rank_split.h"

#include <algorithm>
#include <cstddef>

namespace penstock::scheduling {
namespace {

constexpr size_t kNoRank = static_cast<size_t>(-1);

// The number of workers of each rank, changed one at a time.
class Split {
 public:
  explicit Split(std::span<const RankClaim> ranks) : ranks_(ranks), counts_(ranks.size(), 0) {}

  void keep() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      counts_[rank] = std::min(ranks_[rank].worker_count, ranks_[rank].worker_count_max);
  }

  uint32_t sum() const {
    uint32_t sum = 0;
    for (const uint32_t count : counts_) sum += count;
    return sum;
  }

  // Gives one more worker to the slowest rank that can use one. Returns false if there is none.
  bool add() {
    const size_t rank = slowest_to_grow();
    if (rank == kNoRank) return false;
    ++counts_[rank];
    return true;
  }

  // Takes a worker from the rank that remains fastest without it.
  void take() {
    const size_t rank = fastest_to_give(kNoRank);
    if (rank != kNoRank) --counts_[rank];
  }

  // Makes the move that speeds up the slowest rank, if it pays.
  bool move() {
    const size_t to = slowest_to_grow();
    const size_t from = to == kNoRank ? kNoRank : fastest_to_give(to);
    if (from == kNoRank) return false;
    const double before = speed(to, counts_[to]);
    const double after = std::min(speed(to, counts_[to] + 1), speed(from, counts_[from] - 1));
    if (after < before * kRankMoveGainMin || after <= before) return false;
    --counts_[from];
    ++counts_[to];
    return true;
  }

  double slowest() const {
    double slowest = 1;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (ranks_[rank].worker_count_max > 0) slowest = std::min(slowest, speed(rank, counts_[rank]));
    return slowest;
  }

  std::vector<uint32_t> counts() && { return std::move(counts_); }

 private:
  double speed(size_t rank, uint32_t count) const { return ranks_[rank].progress(count); }

  // Among equally slow ranks the one with fewer workers, and then the first.
  size_t slowest_to_grow() const {
    size_t best = kNoRank;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (counts_[rank] >= ranks_[rank].worker_count_max) continue;
      if (best == kNoRank || is_slower(rank, best)) best = rank;
    }
    return best;
  }
  bool is_slower(size_t rank, size_t other) const {
    const double mine = speed(rank, counts_[rank]);
    const double theirs = speed(other, counts_[other]);
    return mine != theirs ? mine < theirs : counts_[rank] < counts_[other];
  }

  size_t fastest_to_give(size_t taker) const {
    size_t best = kNoRank;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (rank == taker || counts_[rank] == 0) continue;
      if (best == kNoRank || speed(rank, counts_[rank] - 1) > speed(best, counts_[best] - 1)) best = rank;
    }
    return best;
  }

  std::span<const RankClaim> ranks_;
  std::vector<uint32_t> counts_;
};

}  // namespace

std::vector<double> job_progress(std::span<const RankClaim> ranks, uint32_t total_max) {
  Split split(ranks);
  std::vector<double> progress;
  do {
    progress.push_back(split.slowest());
  } while (progress.size() <= total_max && split.add());
  return progress;
}

std::vector<uint32_t> split_among_ranks(std::span<const RankClaim> ranks, uint32_t total) {
  Split split(ranks);
  split.keep();
  while (split.sum() > total) split.take();
  while (split.sum() < total && split.add()) {
  }
  while (split.move()) {
  }
  return std::move(split).counts();
}

}  // namespace penstock::scheduling
