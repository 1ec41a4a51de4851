// SPDX-License-Identifier: Apache-2.0
#include "graph/price.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace penstock::graph {

Prices local_prices(double worker_count) {
  Prices prices;
  prices.worker_count = worker_count;
  prices.link_bytes_per_s = std::numeric_limits<double>::infinity();
  prices.write_bytes_per_s = 4e9;
  prices.read_bytes_per_s = 10e9;  // memory last written by another core
  // Dynamo's guards and the checks of a batch, with cold caches (bench/cut.py --overhead).
  prices.cut_s = 200e-6;
  prices.raw_stays = true;
  return prices;
}

Prices link_prices(double worker_count, const LinkRate& link) {
  Prices prices = local_prices(worker_count);
  prices.link_bytes_per_s = link.bytes_per_s;
  prices.raw_stays = link.sends_whole;
  if (link.bytes_per_s == std::numeric_limits<double>::infinity()) return prices;
  // bench/pool_transport.py: CPU seconds of the sockets per gigabyte, divided between the two sides.
  prices.send_byte_s = 0.33e-9;
  prices.receive_byte_s = 0.33e-9;
  return prices;
}

Ticks to_ticks(double seconds) {
  const double ticks = seconds * 1e12;
  if (!(ticks > 0)) return 0;
  return ticks < static_cast<double>(kTicksMax) ? static_cast<Ticks>(std::llround(ticks)) : kTicksMax;
}

Result<void> check_prices(const Prices& prices) {
  const auto refuse = [](const char* name, double value, const char* expected) {
    return Fault{Errc::kMismatch, "the price " + std::string(name) + " is " + std::to_string(value) + ", expected " +
                                      expected + "; pass another value"};
  };
  const auto is_fee = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!(std::isfinite(prices.worker_count) && prices.worker_count > 0))
    return refuse("worker_count", prices.worker_count, "a positive number");
  if (!(prices.link_bytes_per_s > 0)) return refuse("link_bytes_per_s", prices.link_bytes_per_s, "a positive number");
  if (!(prices.write_bytes_per_s > 0))
    return refuse("write_bytes_per_s", prices.write_bytes_per_s, "a positive number");
  if (!(prices.read_bytes_per_s > 0)) return refuse("read_bytes_per_s", prices.read_bytes_per_s, "a positive number");
  if (!is_fee(prices.send_byte_s)) return refuse("send_byte_s", prices.send_byte_s, "zero or more");
  if (!is_fee(prices.receive_byte_s)) return refuse("receive_byte_s", prices.receive_byte_s, "zero or more");
  if (!is_fee(prices.worker_second)) return refuse("worker_second", prices.worker_second, "zero or more");
  if (!is_fee(prices.trainer_scale)) return refuse("trainer_scale", prices.trainer_scale, "zero or more");
  if (!is_fee(prices.worker_scale)) return refuse("worker_scale", prices.worker_scale, "zero or more");
  if (!is_fee(prices.trainer_node_s)) return refuse("trainer_node_s", prices.trainer_node_s, "zero or more");
  if (!is_fee(prices.cut_s)) return refuse("cut_s", prices.cut_s, "zero or more");
  if (!prices.loads) return {};
  if (!is_fee(prices.loads->trainer_s))
    return refuse("trainer_s of the loads", prices.loads->trainer_s, "zero or more");
  if (!is_fee(prices.loads->worker_s)) return refuse("worker_s of the loads", prices.loads->worker_s, "zero or more");
  if (!is_fee(prices.loads->link_s)) return refuse("link_s of the loads", prices.loads->link_s, "zero or more");
  if (!is_fee(prices.loads->cpus)) return refuse("cpus of the loads", prices.loads->cpus, "zero or more");
  return {};
}

StageSeconds& StageSeconds::operator+=(const StageSeconds& other) {
  trainer_s += other.trainer_s;
  worker_s += other.worker_s;
  link_s += other.link_s;
  return *this;
}

StageSeconds link_seconds(const Prices& prices, int64_t bytes) {
  const auto count = static_cast<double>(bytes);
  return {.trainer_s = count * prices.receive_byte_s,
          .worker_s = prices.worker_scale * count * prices.send_byte_s,
          .link_s = count / prices.link_bytes_per_s};
}

StageSeconds memory_seconds(const Prices& prices, int64_t bytes) {
  const auto count = static_cast<double>(bytes);
  return {.trainer_s = count / prices.read_bytes_per_s,
          .worker_s = prices.worker_scale * count / prices.write_bytes_per_s};
}

Ticks price_of(const Prices& prices, const Weights& weights, const StageSeconds& seconds) {
  return to_ticks(weights.trainer * seconds.trainer_s) +
         to_ticks(weights.worker * seconds.worker_s / prices.worker_count) + to_ticks(weights.link * seconds.link_s);
}

double step_seconds(const Prices& prices, const Loads& loads, const StageSeconds& seconds) {
  return step_of(prices, loads, seconds).step_s;
}

StepSeconds step_of(const Prices& prices, const Loads& loads, const StageSeconds& seconds) {
  const double trainer_s = loads.trainer_s + seconds.trainer_s;
  const double worker_s = loads.worker_s + seconds.worker_s;
  const double link_s = loads.link_s + seconds.link_s;
  const double cpu_s = loads.cpus > 0 ? (trainer_s + worker_s) / loads.cpus : 0;
  return {.trainer_s = trainer_s,
          .worker_s = worker_s,
          .link_s = link_s,
          .step_s = std::max({trainer_s, worker_s / prices.worker_count, link_s, cpu_s})};
}

}  // namespace penstock::graph
