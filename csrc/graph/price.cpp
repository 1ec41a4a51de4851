// SPDX-License-Identifier: Apache-2.0
#include "graph/price.h"

#include <cmath>
#include <string>

namespace penstock::graph {

Ticks to_ticks(double seconds) {
  const double ticks = seconds * 1e12;
  if (!(ticks > 0)) return 0;
  return ticks < static_cast<double>(kTicksMax) ? static_cast<Ticks>(std::llround(ticks)) : kTicksMax;
}

Result<void> check_prices(const Prices& prices) {
  const auto refuse = [](const char* name, double value, const char* expected) {
    return Error{Errc::kMismatch, "the price " + std::string(name) + " is " + std::to_string(value) + ", expected " +
                                      expected + "; pass another one"};
  };
  const auto is_fee = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!(std::isfinite(prices.worker_count) && prices.worker_count > 0))
    return refuse("worker_count", prices.worker_count, "a positive number");
  if (!(prices.link_bytes_per_s > 0)) return refuse("link_bytes_per_s", prices.link_bytes_per_s, "a positive number");
  if (!is_fee(prices.worker_second)) return refuse("worker_second", prices.worker_second, "zero or more");
  if (!is_fee(prices.trainer_scale)) return refuse("trainer_scale", prices.trainer_scale, "zero or more");
  if (!is_fee(prices.trainer_node_s)) return refuse("trainer_node_s", prices.trainer_node_s, "zero or more");
  return {};
}

Ticks worker_price(const Prices& prices, double seconds) {
  return to_ticks(seconds * prices.worker_second / prices.worker_count);
}

double trainer_seconds(const Prices& prices, double seconds) {
  return seconds * prices.trainer_scale + prices.trainer_node_s;
}

Ticks link_price(const Prices& prices, int64_t bytes) {
  return to_ticks(static_cast<double>(bytes) / prices.link_bytes_per_s);
}

}  // namespace penstock::graph
