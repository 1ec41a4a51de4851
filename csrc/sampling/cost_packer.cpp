// SPDX-License-Identifier: Apache-2.0
#include "sampling/cost_packer.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "base/result.h"

namespace penstock::sampling {

namespace {

constexpr size_t kWindow = 4;              // a step may choose from this many times the samples that it takes
constexpr size_t kExchangesMax = 4;        // per rank, in one step
constexpr double kEvenEnough = 1.0 / 256;  // of the budget, between the most and the least loaded batch
// The last samples are split over two steps if one step would be filled beyond this fraction.
constexpr double kFull = 0.95;
constexpr double kSlack = 1.02;  // factor on the budget of half of them, so that they can be packed

}  // namespace

CostPacker::CostPacker(std::span<const double> costs, std::vector<int64_t> order)
    : costs_(costs), order_(std::move(order)) {
  for (const int64_t index : order_) left_cost_ += costs_[static_cast<size_t>(index)];
}

// Assigns the next `count` samples, the most expensive first, each to the least loaded batch. Returns whether all fit.
bool CostPacker::share_out(size_t count, const CostPackerOptions& options, std::vector<Load>& loads) const {
  std::vector<Item> items(count);
  for (size_t at = 0; at < count; ++at) items[at] = {first_ + at, costs_[static_cast<size_t>(order_[first_ + at])]};
  std::ranges::stable_sort(items, [](const Item& a, const Item& b) { return a.cost > b.cost; });
  loads.assign(options.rank_count, {});
  using Entry = std::pair<double, size_t>;  // cost of a batch, rank
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> least;
  for (size_t rank = 0; rank < options.rank_count; ++rank) least.emplace(0, rank);
  for (const Item& item : items) {
    if (least.empty()) return false;
    const auto [cost, rank] = least.top();
    if (cost + item.cost > options.budget) return false;
    least.pop();
    Load& load = loads[rank];
    load.cost = cost + item.cost;
    load.items.push_back(item);
    if (options.batch_size_max == 0 || load.items.size() < options.batch_size_max) least.emplace(load.cost, rank);
  }
  return true;
}

// Fills the least loaded batches with the largest samples that fit, chosen from the samples after the first `count`.
void CostPacker::top_up(size_t count, const CostPackerOptions& options, std::vector<Load>& loads) const {
  const size_t end = std::min(left_count(), count * kWindow);
  if (end <= count) return;
  // There are many candidates, and few are taken: scanning all of them for each is cheaper than sorting them.
  std::vector<double> costs(end - count);
  for (size_t at = 0; at < costs.size(); ++at) costs[at] = costs_[static_cast<size_t>(order_[first_ + count + at])];
  const auto is_open = [&](const Load& load) {
    return options.batch_size_max == 0 || load.items.size() < options.batch_size_max;
  };
  for (;;) {
    Load* least = nullptr;
    for (Load& load : loads)
      if (is_open(load) && (least == nullptr || load.cost < least->cost)) least = &load;
    if (least == nullptr) return;
    double best = 0;  // the cost of a taken candidate is 0, so it is never better
    for (const double cost : costs) best = least->cost + cost <= options.budget && cost > best ? cost : best;
    if (best == 0) return;
    const auto found = std::find(costs.rbegin(), costs.rend(), best);
    least->cost += best;
    least->items.push_back({first_ + count + static_cast<size_t>(costs.rend() - found) - 1, best});
    *found = 0;
  }
}

// Exchanges samples between the most and the least loaded batch while this reduces the difference of their costs.
void CostPacker::even_out(const CostPackerOptions& options, std::vector<Load>& loads) {
  const auto by_cost = [](const Load& a, const Load& b) { return a.cost < b.cost; };
  for (size_t round = 0; round < kExchangesMax * loads.size(); ++round) {
    const auto [least, most] = std::ranges::minmax_element(loads, by_cost);
    const double gap = most->cost - least->cost;
    if (gap <= kEvenEnough * options.budget) return;
    double best_gap = gap;
    Item* given = nullptr;
    Item* taken = nullptr;
    for (Item& from : most->items) {
      for (Item& to : least->items) {
        const double gap_then = std::abs(gap - 2 * (from.cost - to.cost));
        if (gap_then >= best_gap) continue;
        best_gap = gap_then;
        given = &from;
        taken = &to;
      }
    }
    if (given == nullptr) return;
    std::swap(*given, *taken);
    most->cost = cost_of(*most);
    least->cost = cost_of(*least);
    if (std::max(most->cost, least->cost) <= options.budget) continue;
    std::swap(*given, *taken);  // a sum was rounded up
    most->cost = cost_of(*most);
    least->cost = cost_of(*least);
    return;
  }
}

double CostPacker::cost_of(const Load& load) {
  double cost = 0;
  for (const Item& item : load.items) cost += item.cost;
  return cost;
}

// A full step may leave too few samples for the last step to form batches of equal cost. So the last two steps cost the
// same.
CostPackerOptions CostPacker::for_next(CostPackerOptions options) const {
  const double full = kFull * options.budget * static_cast<double>(options.rank_count);
  if (options.rank_count < 2 || left_cost_ <= full || left_cost_ >= 2 * full) return options;
  std::vector<Load> loads;
  if (share_out(left_count(), options, loads)) return options;  // one step has room for all
  double longest = 0;
  for (size_t at = first_; at < order_.size(); ++at)
    longest = std::max(longest, costs_[static_cast<size_t>(order_[at])]);
  const double half = kSlack * left_cost_ / 2 / static_cast<double>(options.rank_count);
  options.budget = std::min(options.budget, std::max(longest, half));
  return options;
}

std::vector<std::vector<int64_t>> CostPacker::next(const CostPackerOptions& asked) {
  if (left_count() == 0) return {};
  const CostPackerOptions options = for_next(asked);
  // Start with as many samples as use up the budgets of all batches, and reduce the number until they can be assigned.
  size_t count = 0;
  const double total = options.budget * static_cast<double>(options.rank_count);
  double sum = 0;
  while (count < left_count()) {
    sum += costs_[static_cast<size_t>(order_[first_ + count])];
    if (sum > total && count > 0) break;
    ++count;
  }
  if (options.batch_size_max > 0) count = std::min(count, options.batch_size_max * options.rank_count);
  std::vector<Load> loads;
  while (!share_out(count, options, loads)) {
    PENSTOCK_ASSERT(count > 1, "a single sample must be within the budget");
    count -= std::max<size_t>(1, count / 64);
  }
  top_up(count, options, loads);
  even_out(options, loads);
  std::vector<std::vector<int64_t>> batches(options.rank_count);
  for (size_t rank = 0; rank < options.rank_count; ++rank) {
    std::ranges::sort(loads[rank].items, {}, &Item::place);
    for (const Item& item : loads[rank].items) batches[rank].push_back(order_[item.place]);
  }
  take(loads);
  return batches;
}

// Moves the samples that were not taken behind the taken ones.
void CostPacker::take(const std::vector<Load>& loads) {
  std::vector<size_t> places;
  for (const Load& load : loads)
    for (const Item& item : load.items) {
      places.push_back(item.place);
      left_cost_ -= item.cost;
    }
  std::ranges::sort(places);
  // From the last place taken backwards, the remaining samples move up.
  size_t to = places.back() + 1;
  size_t taken = places.size();
  for (size_t from = places.back() + 1; from-- > first_;) {
    if (taken > 0 && places[taken - 1] == from) {
      --taken;
    } else {
      order_[--to] = order_[from];
    }
  }
  first_ += places.size();
  PENSTOCK_ASSERT(to == first_, "the number of removed samples must equal the number taken");
}

}  // namespace penstock::sampling
