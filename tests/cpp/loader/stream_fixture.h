// SPDX-License-Identifier: Apache-2.0
#pragma once
// A client with real worker processes and no Python: starts them, streams, and compares every batch with the one that
// it must be.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../base/seeded_test.h"
#include "loader/client.h"
#include "stream_batches.h"
#include "worker_processes.h"

namespace penstock::loader {

using Indices = std::vector<int64_t>;
using Event = Client::Event;

inline at::Tensor make_tensor_on_heap(const std::vector<int64_t>& sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions().dtype(type));
}

inline testing::AssertionResult is_same(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != right.scalar_type() || left.sizes() != right.sizes()) {
    return testing::AssertionFailure() << left.sizes() << " where " << right.sizes() << " was expected";
  }
  const size_t bytes = static_cast<size_t>(left.numel()) * left.element_size();
  if (bytes == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), bytes) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "elements differ";
}

class StreamTest : public test::SeededTest {
 protected:
  // As in a trainer that forks workers: torch's pool of threads does not survive a fork.
  StreamTest() { at::set_num_threads(1); }

  // Workers must be gone by themselves when their trainer is.
  void TearDown() override {
    client_.reset();
    expect_workers_end();
  }

  void start(const ClientOptions& options, const test::WorkerArguments& arguments = {}) {
    options_ = options;
    client_ = std::make_shared<Client>(options);
    start_workers(*client_, arguments);
    const auto started = client_->start();
    ASSERT_TRUE(started) << started.error().message;
  }

  // Of a client, or of its source, that is started next.
  template <typename Source>
  void start_workers(Source& source, test::WorkerArguments arguments = {}) {
    arguments.prefetch_factor = options_.prefetch_factor;
    for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) {
      arguments.worker_id = worker_id;
      worker_pids_.push_back(test::start_worker(source, arguments));
      ASSERT_GT(worker_pids_.back(), 0);
    }
  }

  // Begins an epoch of these batches and asks for as many as may be outstanding.
  void begin_epoch(std::vector<Indices> batches) {
    client_->begin_epoch();
    ++epoch_;
    batches_ = std::move(batches);
    submitted_count_ = 0;
    for (uint32_t request = 0; request < options_.worker_count * options_.prefetch_factor; ++request) submit();
  }
  void submit() {
    if (submitted_count_ == batches_.size()) return;
    const Indices& indices = batches_[submitted_count_];
    if (client_->submit({.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(std::span(indices))}))
      ++submitted_count_;
  }

  // The next event; kNothing only after half a minute of silence.
  Event next() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (;;) {
      Event event = client_->try_next();
      if (event.kind == Event::Kind::kBatch || event.kind == Event::Kind::kShardEnded) submit();
      if (event.kind != Event::Kind::kNothing || std::chrono::steady_clock::now() > deadline) return event;
      client_->wait_until(deadline);
    }
  }
  std::unique_ptr<Batch> next_batch() {
    Event event = next();
    if (event.kind != Event::Kind::kBatch) {
      throw std::runtime_error("event " + std::to_string(static_cast<int>(event.kind)) +
                               " came in place of a batch: " + std::string(event.message()));
    }
    return std::move(event.batch);
  }

  // Holds a batch against the one that its worker was asked for.
  void expect_right(Batch& batch) {
    const auto& facts = batch.record().facts();
    ASSERT_EQ(facts.epoch, epoch_);
    ASSERT_LT(facts.sequence, batches_.size());
    expect_right(batch.tensors().all(), facts.sequence);
  }
  void expect_right(const std::vector<at::Tensor>& tensors, uint64_t sequence) {
    const auto expected = test::make_batch(epoch_, sequence, batches_[sequence], make_tensor_on_heap);
    ASSERT_EQ(tensors.size(), expected.size());
    for (size_t index = 0; index < expected.size(); ++index) {
      ASSERT_TRUE(is_same(tensors[index], expected[index])) << "batch " << sequence << " tensor " << index;
    }
  }

  // Streams the rest of the epoch and returns the sequences as they came.
  std::vector<uint64_t> finish_epoch() {
    std::vector<uint64_t> sequences;
    for (Event event = next(); event.kind == Event::Kind::kBatch && !HasFatalFailure(); event = next()) {
      sequences.push_back(event.batch->record().facts().sequence);
      expect_right(*event.batch);
    }
    return sequences;
  }

  std::vector<Indices> draw_batches(size_t count) {
    std::vector<Indices> batches(count);
    for (Indices& indices : batches) {
      indices.resize(draw<size_t>(1, 20));
      for (int64_t& index : indices) index = draw<int64_t>(0, 50'000);
    }
    return batches;
  }
  static std::vector<uint64_t> counting(size_t count) {
    std::vector<uint64_t> numbers(count);
    for (size_t number = 0; number < count; ++number) numbers[number] = number;
    return numbers;
  }

  void expect_workers_end(const std::string& expected = "exit 0") {
    for (const pid_t pid : worker_pids_) {
      const auto status = test::wait_for_exit(pid, std::chrono::seconds(10));
      EXPECT_EQ(test::how_it_ended(status), expected);
      if (!status) ::kill(pid, SIGKILL);
    }
    worker_pids_.clear();
  }
  void expect_worker_ends(size_t worker_id, const std::string& expected) {
    EXPECT_EQ(test::how_it_ended(test::wait_for_exit(worker_pids_[worker_id], std::chrono::seconds(10))), expected);
    worker_pids_.erase(worker_pids_.begin() + static_cast<ptrdiff_t>(worker_id));
  }

  ClientOptions options_;
  std::shared_ptr<Client> client_;
  std::vector<pid_t> worker_pids_;
  std::vector<Indices> batches_;
  size_t submitted_count_ = 0;
  uint32_t epoch_ = 0;
};

}  // namespace penstock::loader
