// SPDX-License-Identifier: Apache-2.0
// A worker process without Python: serves the batches of stream_batches.h until its trainer hangs up.
//
// usage: stream_worker_main CHANNEL_FD PREFETCH_FACTOR ARENA_BYTES FILE_BYTES_MAX
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "../base/child_process.h"
#include "stream_batches.h"
#include "wire/nest.h"
#include "worker/local_server.h"
#include "worker/process_memory.h"

namespace penstock::test {
namespace {

using wire::ToJob;
using worker::LocalServer;

std::vector<int64_t> indices_of(const LocalServer::Received& received) {
  std::vector<int64_t> indices(received.indices.size() / sizeof(int64_t));
  if (!indices.empty()) std::memcpy(indices.data(), received.indices.data(), indices.size() * sizeof(int64_t));
  return indices;
}

// Half of the tensors are made in the slab and half elsewhere, as with a dataset that collates some parts itself.
std::vector<at::Tensor> make_batch_at(LocalServer& server, const LocalServer::Received& received,
                                      const std::vector<int64_t>& indices) {
  int made_count = 0;
  return make_batch(received.request.epoch, received.request.sequence, indices,
                    [&](const std::vector<int64_t>& sizes, at::ScalarType type) {
                      at::Tensor tensor;
                      if (made_count++ % 2 == 0) tensor = server.writer().empty(sizes, type);
                      return tensor.defined() ? tensor : at::empty(sizes, at::TensorOptions().dtype(type));
                    });
}

Result<void> answer(LocalServer& server, const LocalServer::Received& received, const std::vector<int64_t>& indices) {
  server.writer().begin();
  wire::NestWriter nest;
  nest.tuple(4), nest.tensor(0), nest.tensor(1), nest.tensor(2), nest.text("batch");
  const bool raises = !indices.empty() && indices.front() == kRaise;
  return server.answer(received,
                       {.tensors = make_batch_at(server, received, raises ? std::vector<int64_t>{} : indices),
                        .boundary_keys = {},
                        .nest = nest.view()},
                       raises ? wire::kBatchRaises : uint8_t{0});
}

// Dies, while a child that the dataset has forked holds the channel open until the trainer hangs up.
void leave_to_child(int channel_fd) {
  if (::fork() != 0) ::raise(SIGKILL);
  pollfd item{.fd = channel_fd, .events = POLLRDHUP, .revents = 0};
  ::poll(&item, 1, -1);
  ::_exit(EXIT_SUCCESS);
}

// Returns the process's exit status.
int serve(LocalServer& server, int channel_fd) {
  std::set<uint32_t> ended_shards;
  for (;;) {
    const auto received = server.next(std::chrono::steady_clock::now() + std::chrono::hours(1));
    if (!received) return received.error().code == Errc::kClosed ? EXIT_SUCCESS : 3;
    if (received.value().kind != ToJob::Kind::kWork) {
      ended_shards.clear();
      continue;
    }
    const uint32_t shard_id = received.value().request.shard_id;
    if (ended_shards.contains(shard_id)) continue;
    const auto indices = indices_of(received.value());
    const int64_t first = indices.empty() ? 0 : indices.front();
    if (first == kDie) ::raise(SIGKILL);
    if (first == kDieWithAChild) leave_to_child(channel_fd);
    if (first == kEnd) ended_shards.insert(shard_id);
    const std::string state = "shard " + std::to_string(shard_id) + " has ended";
    const auto answered = first == kEnd ? server.answer_end(received.value(), std::as_bytes(std::span(state)))
                                        : answer(server, received.value(), indices);
    if (!answered) return answered.error().code == Errc::kClosed ? EXIT_SUCCESS : 4;
    while (first == kStall) ::poll(nullptr, 0, -1);
  }
}

int run(char** arguments) {
  worker::tune_malloc();
  at::set_num_threads(1);
  const auto file_bytes_max = std::strtoull(arguments[4], nullptr, 10);
  if (file_bytes_max > 0) limit_file_size(file_bytes_max);
  const int channel_fd = std::atoi(arguments[1]);
  auto server = LocalServer::open({.prefetch_factor = static_cast<uint32_t>(std::strtoul(arguments[2], nullptr, 10)),
                                   .arena_bytes = std::strtoull(arguments[3], nullptr, 10)},
                                  FileDescriptor(channel_fd));
  if (!server && server.error().code == Errc::kClosed) return EXIT_SUCCESS;
  if (!server) {
    std::cerr << "stream_worker_main: " << server.error().message << '\n';
    return 2;
  }
  return serve(*server.value(), channel_fd);
}

}  // namespace
}  // namespace penstock::test

int main(int argument_count, char** arguments) {
  if (argument_count != 5) return 64;
  return penstock::test::run(arguments);
}
