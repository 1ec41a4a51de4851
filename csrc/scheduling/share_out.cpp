// SPDX-License-Identifier: Apache-2.0
#include "scheduling/share_out.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

namespace penstock::scheduling {
namespace {

constexpr size_t kNobody = static_cast<size_t>(-1);

bool is_fit(const AssignedWorker& hand, const Demand& demand) {
  return std::find(hand.declined.begin(), hand.declined.end(), demand.trainer_id) == hand.declined.end();
}

// The planned number of workers of each trainer. Trainers and workers are identified by their indices.
class Plan {
 public:
  Plan(std::span<const Demand> demands, std::span<const AssignedWorker> hands)
      : demands_(demands), hands_(hands), owners_(hands.size(), kNobody), counts_(demands.size(), 0) {
    for (size_t trainer = 0; trainer < demands_.size(); ++trainer) keep(trainer);
  }

  void balance() {
    while (improve()) {
    }
  }

  std::vector<Move> moves() const {
    std::vector<Move> moves;
    for (size_t hand = 0; hand < hands_.size(); ++hand) {
      const uint64_t planned = owners_[hand] == kNobody ? 0 : demands_[owners_[hand]].trainer_id;
      const bool can_be_given =
          hands_[hand].state == AssignedWorker::State::kFree || hands_[hand].state == AssignedWorker::State::kStray;
      if (can_be_given && planned != 0) moves.push_back({.hand = hand, .trainer_id = planned});
      if (hands_[hand].state == AssignedWorker::State::kHeld && planned != hands_[hand].trainer_id)
        moves.push_back({.hand = hand});
    }
    return moves;
  }

 private:
  // A trainer gets a worker from another one, which gets a replacement from the next.
  struct Step {
    size_t trainer = kNobody;
    size_t hand = kNobody;
  };

  bool works_for(size_t hand, size_t trainer) const {
    return hands_[hand].state == AssignedWorker::State::kHeld &&
           hands_[hand].trainer_id == demands_[trainer].trainer_id;
  }

  void keep(size_t trainer) {
    std::vector<size_t> held;
    for (size_t hand = 0; hand < hands_.size(); ++hand)
      if (works_for(hand, trainer) && is_fit(hands_[hand], demands_[trainer])) held.push_back(hand);
    const auto is_older = [&](size_t a, size_t b) { return hands_[a].given_order < hands_[b].given_order; };
    std::sort(held.begin(), held.end(), is_older);
    if (held.size() > demands_[trainer].worker_count_max) held.resize(demands_[trainer].worker_count_max);
    for (const size_t hand : held) owners_[hand] = trainer;
    counts_[trainer] = static_cast<uint32_t>(held.size());
  }

  bool improve() {
    std::vector<size_t> poorest_first;
    for (size_t trainer = 0; trainer < demands_.size(); ++trainer)
      if (counts_[trainer] < demands_[trainer].worker_count_max) poorest_first.push_back(trainer);
    std::sort(poorest_first.begin(), poorest_first.end(), [&](size_t a, size_t b) {
      return std::pair(counts_[a], demands_[a].trainer_id) < std::pair(counts_[b], demands_[b].trainer_id);
    });
    return std::any_of(poorest_first.begin(), poorest_first.end(), [&](size_t trainer) { return enrich(trainer); });
  }

  // Gives a trainer one more worker, unowned or else from the richest reachable trainer.
  bool enrich(size_t poor) {
    std::vector<Step> reached_by(demands_.size());  // the trainer that takes a worker from this one, and the worker
    std::deque<size_t> to_visit{poor};
    std::optional<size_t> richest;
    while (!to_visit.empty()) {
      const size_t trainer = to_visit.front();
      to_visit.pop_front();
      if (counts_[trainer] >= counts_[poor] + 2 && (!richest || counts_[trainer] > counts_[*richest]))
        richest = trainer;
      if (const auto hand = find_unowned(trainer)) {
        owners_[*hand] = trainer;
        pass_on(trainer, poor, reached_by);
        return true;
      }
      for (size_t other = 0; other < demands_.size(); ++other) {
        if (other == poor || reached_by[other].trainer != kNobody) continue;
        const auto hand = find_spare(other, trainer);
        if (!hand) continue;
        reached_by[other] = {.trainer = trainer, .hand = *hand};
        to_visit.push_back(other);
      }
    }
    if (!richest) return false;
    --counts_[*richest];
    pass_on(*richest, poor, reached_by);
    return true;
  }

  // Along the path back to the poor trainer.
  void pass_on(size_t from, size_t poor, const std::vector<Step>& reached_by) {
    for (size_t trainer = from; trainer != poor; trainer = reached_by[trainer].trainer)
      owners_[reached_by[trainer].hand] = reached_by[trainer].trainer;
    ++counts_[poor];
  }

  // Prefers workers that can be given now over workers that are still moving, and strays last.
  std::optional<size_t> find_unowned(size_t trainer) const {
    std::optional<size_t> found;
    for (size_t hand = 0; hand < hands_.size(); ++hand) {
      if (owners_[hand] != kNobody || !is_fit(hands_[hand], demands_[trainer])) continue;
      if (hands_[hand].state == AssignedWorker::State::kFree) return hand;
      const bool is_better = found && hands_[*found].state == AssignedWorker::State::kStray &&
                             hands_[hand].state != AssignedWorker::State::kStray;
      if (!found || is_better) found = hand;
    }
    return found;
  }

  // The owner's worker that `other` can use and that the owner needs least.
  std::optional<size_t> find_spare(size_t owner, size_t other) const {
    std::optional<size_t> found;
    const auto worth = [&](size_t hand) { return std::pair(!works_for(hand, owner), hands_[hand].given_order); };
    for (size_t hand = 0; hand < hands_.size(); ++hand) {
      if (owners_[hand] != owner || !is_fit(hands_[hand], demands_[other])) continue;
      if (!found || worth(hand) > worth(*found)) found = hand;
    }
    return found;
  }

  std::span<const Demand> demands_;
  std::span<const AssignedWorker> hands_;
  std::vector<size_t> owners_;    // by hand
  std::vector<uint32_t> counts_;  // by trainer
};

}  // namespace

std::vector<Move> share_out(std::span<const Demand> demands, std::span<const AssignedWorker> hands) {
  Plan plan(demands, hands);
  plan.balance();
  return plan.moves();
}

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
