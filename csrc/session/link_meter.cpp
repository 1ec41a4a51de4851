// SPDX-License-Identifier: Apache-2.0
#include "session/link_meter.h"

#include <algorithm>
#include <vector>

namespace penstock::session {
namespace {

// A number of concurrent senders is ignored if it held for less than this share of the time in which batches were in
// transit.
constexpr double kShareMin = 0.05;
// Workers whose combined rate reaches this share of the sum of their individual rates have separate links.
constexpr double kIndependentShare = 0.75;
constexpr Duration kCrossingTimeMin = std::chrono::microseconds(1);  // of one batch; clocks are not more precise

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

// The time during which a given number of workers sent, and the bytes sent in it.
struct Traffic {
  double time_s = 0;
  double bytes = 0;

  double rate() const { return bytes / time_s; }
};

}  // namespace

void LinkMeter::note_message(uint64_t worker_id, Duration sent_at, Instant now) {
  Clock& clock = clocks_[worker_id];
  if (clock.window_began == Instant{} || now - clock.window_began >= kClockWindow) {
    clock.least_before = clock.least;
    clock.least.reset();
    clock.window_began = now;
  }
  const Duration difference = now.time_since_epoch() - sent_at;
  clock.least = clock.least ? std::min(*clock.least, difference) : difference;
}

void LinkMeter::note_batch(uint64_t worker_id, Duration sent_at, uint64_t bytes, Instant now, bool is_narrow) {
  note_message(worker_id, sent_at, now);
  Clock& clock = clocks_[worker_id];
  const Instant made_at{sent_at + clock.difference()};
  const Instant began =
      std::min(std::max({made_at, clock.last_arrival, now - kCrossingAgeMax}), now - kCrossingTimeMin);
  clock.last_arrival = now;
  if (is_narrow) slow_narrow_count_ = now - began >= kMeasurableTimeMin ? slow_narrow_count_ + 1 : 0;
  const bool is_rate_sample = !is_narrow || slow_narrow_count_ > kSlowNarrowCountMin;
  if (is_rate_sample) crossings_.push_back({.began = began, .ended = now, .bytes = bytes});
  while (crossings_.size() > kCrossingCountMax ||
         (!crossings_.empty() && now - crossings_.front().ended > kCrossingAgeMax))
    crossings_.pop_front();
  is_outdated_ = crossings_.size() < kCrossingCountMin && (is_outdated_ || !is_rate_sample);
}

std::optional<Instant> LinkMeter::written_at(uint64_t worker_id, Duration sent_at) const {
  const auto clock = clocks_.find(worker_id);
  if (clock == clocks_.end()) return std::nullopt;
  return Instant{sent_at + clock->second.difference() - round_trip_.value_or(Duration(0)) / 2};
}

void LinkMeter::note_round_trip(Duration time) { round_trip_ = round_trip_ ? std::min(*round_trip_, time) : time; }

std::optional<double> LinkMeter::bytes_per_s(size_t worker_count) const {
  if (crossings_.size() < kCrossingCountMin) return std::nullopt;
  // The times at which the number of senders changes, and by how much; the rate of all current senders.
  struct Change {
    Instant at;
    int senders;
    double rate;
  };
  std::vector<Change> changes;
  for (const Crossing& crossing : crossings_) {
    const double rate = static_cast<double>(crossing.bytes) / seconds(crossing.ended - crossing.began);
    changes.push_back({crossing.began, 1, rate});
    changes.push_back({crossing.ended, -1, -rate});
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.at < b.at; });
  std::map<int, Traffic> by_senders;
  double rate = 0, busy_s = 0;
  int senders = 0;
  for (size_t index = 0; index + 1 < changes.size(); ++index) {
    senders += changes[index].senders;
    rate += changes[index].rate;
    const double time_s = seconds(changes[index + 1].at - changes[index].at);
    if (senders == 0 || time_s <= 0) continue;
    by_senders[senders].time_s += time_s;
    by_senders[senders].bytes += rate * time_s;
    busy_s += time_s;
  }
  std::erase_if(by_senders, [&](const auto& item) { return item.second.time_s < kShareMin * busy_s; });
  if (by_senders.empty()) return std::nullopt;
  const auto& [most, together] = *by_senders.rbegin();
  const auto& [fewest, apart] = *by_senders.begin();
  if (most == fewest) return together.rate();
  const double each = apart.rate() / fewest;
  const bool is_independent = together.rate() >= kIndependentShare * each * most;
  const auto count = static_cast<double>(std::max<size_t>(worker_count, static_cast<size_t>(most)));
  return is_independent ? together.rate() / most * count : together.rate();
}

}  // namespace penstock::session
