// SPDX-License-Identifier: Apache-2.0
// A trainer process without Python, made to be killed: streams some batches from two workers, leaves one of them stuck
// in its dataset and one idle, writes both process ids to standard output, and never ends.
//
// usage: stream_trainer_main
#include <ATen/Parallel.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "loader/client.h"
#include "stream_batches.h"
#include "worker_processes.h"

namespace penstock::test {
namespace {

using loader::Client;

bool submit(Client& client, int64_t index) {
  const std::vector<int64_t> indices = {index};
  return client.submit({.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(std::span(indices))});
}

bool receive_batch(Client& client) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (;;) {
    const auto event = client.try_next();
    if (event.kind == Client::Event::Kind::kBatch) return true;
    if (event.kind != Client::Event::Kind::kNothing || !client.wait_until(deadline)) return false;
  }
}

// Returns only when something went wrong.
int run() {
  at::set_num_threads(1);
  Client client({.worker_count = 2});
  std::string report;
  for (uint32_t worker_id = 0; worker_id < 2; ++worker_id) {
    report += std::to_string(start_worker(client, {.worker_id = worker_id})) + "\n";
  }
  if (!client.start()) return 2;
  client.begin_epoch();
  for (const int64_t index : {int64_t{1}, int64_t{2}, kStall, int64_t{3}}) {
    if (!submit(client, index)) return 3;
  }
  for (int count = 0; count < 4; ++count) {
    if (!receive_batch(client)) return 4;
  }
  if (::write(STDOUT_FILENO, report.data(), report.size()) < 0) return 5;
  for (;;) ::poll(nullptr, 0, -1);
}

}  // namespace
}  // namespace penstock::test

int main() { return penstock::test::run(); }
