// SPDX-License-Identifier: Apache-2.0
#include "loader/thread_source.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#include "base/exception_name.h"

namespace penstock::loader {
using std::chrono::steady_clock;

ThreadSource::ThreadSource(const ThreadSourceOptions& options, std::vector<std::unique_ptr<ThreadMaker>> makers,
                           bool has_threads)
    : BatchSource(options.arrival_count_max), options_(options), has_threads_(has_threads), makers_(std::move(makers)) {
  PENSTOCK_ASSERT(!makers_.empty() && (has_threads || makers_.size() == 1));
  const size_t queue_count = options.is_iterable ? makers_.size() : 1;
  for (size_t index = 0; index < queue_count; ++index)
    queues_.push_back(std::make_unique<Queue>(options.arrival_count_max));
}

ThreadSource::~ThreadSource() { stop(); }

Result<void> ThreadSource::start(Stages stages) {
  if (auto started = stages_.start(std::move(stages)); !started) return started;
  if (!has_threads_) return {};
  // torch stores the number of threads of an operator for the whole process and, once a thread has used it, for that
  // thread: each thread sets its number, and this one restores the process's.
  const int thread_count = at::get_num_threads();
  std::latch begun(worker_count());
  try {
    for (uint32_t worker_id = 0; worker_id < worker_count(); ++worker_id)
      threads_.emplace_back([this, worker_id, &begun] { run(worker_id, begun); });
  } catch (const std::system_error& error) {
    const size_t started_count = threads_.size();
    begun.count_down(static_cast<std::ptrdiff_t>(worker_count() - started_count));
    begun.wait();
    at::set_num_threads(thread_count);
    stop();
    return Fault{Errc::kNoMemory, "starting thread " + std::to_string(started_count) + " of " +
                                      std::to_string(makers_.size()) + " failed: " + error.what() +
                                      "; ask for fewer (num_workers), or raise the limit of processes (ulimit -u)"};
  }
  begun.wait();
  at::set_num_threads(thread_count);
  return {};
}

void ThreadSource::stop() {
  inbox_.close();
  stages_.close();
  for (const auto& queue : queues_) {
    queue->close();
    while (queue->try_pop()) {
    }
  }
  threads_.clear();
  stages_.stop();
}

void ThreadSource::announce(const wire::ToJob& message) {
  PENSTOCK_ASSERT(message.kind == wire::ToJob::Kind::kEpoch, "threads receive only the start of an epoch");
  const auto seeds = wire::EpochSeeds::from_bytes(message.seeds);
  PENSTOCK_ASSERT(seeds.has_value(), "an epoch started without its seeds");
  seeds_ = *seeds;
}

void ThreadSource::fetch(const std::shared_ptr<session::RequestContent>& content) {
  static_cast<void>(queue_of(content->request.shard_id).push({.content = content, .seeds = seeds_}));
}

void ThreadSource::run(uint32_t worker_id, std::latch& begun) {
  ::pthread_setname_np(::pthread_self(), "pk_data_worker");
  at::set_num_threads(1);
  begun.count_down();
  Queue& queue = queue_of(worker_id);
  try {
    while (auto work = queue.pop_until(steady_clock::time_point::max())) carry_out(worker_id, *work);
  } catch (...) {
    stages_.fail(worker_id, {Errc::kFailed,
                             "the thread pk_data_worker, which makes batches, failed: " + current_exception_text()});
  }
}

bool ThreadSource::try_make_here() {
  if (has_threads_) return false;
  auto work = queues_[0]->try_pop();
  if (work) carry_out(0, *work);
  return work.has_value();
}

void ThreadSource::carry_out(uint32_t worker_id, const Work& work) {
  const wire::BatchRequest& request = work.content->request;
  if (inbox_.is_stale(request.epoch)) return;
  const auto began_at = steady_clock::now();
  wire::BatchFacts facts{.sequence = request.sequence, .epoch = request.epoch, .worker_id = worker_id};
  Arrival arrival{.kind = Arrival::Kind::kBatch,
                  .worker_id = worker_id,
                  .epoch = request.epoch,
                  .sequence = request.sequence,
                  .batch = {},
                  .error = {}};
  try {
    ThreadMaker::Made made = makers_[worker_id]->make(*work.content, work.seeds);
    if (made.is_end) {
      arrival.kind = Arrival::Kind::kEnd;
      arrival.state = std::move(made.state);
      return stages_.arrive(std::move(arrival));
    }
    facts.fetch_time = wire::time_units(steady_clock::now() - began_at);
    facts.prefix_time = made.prefix_time;
    facts.samples = made.samples;
    if (made.is_compiled) facts.flags |= wire::kBatchCompiled;
    arrival.batch = Batch::from_tensors(facts, std::move(made.content));
    arrival.batch->set_state(made.state);
  } catch (const std::exception& error) {
    arrival.batch = Batch::from_error(facts, describe_exception(worker_id, error.what()));
  } catch (...) {
    arrival.batch = Batch::from_error(facts, describe_exception(worker_id, "not a std::exception"));
  }
  stages_.arrive(std::move(arrival));
}

Batch::RemoteError ThreadSource::describe_exception(uint32_t worker_id, const char* what) const {
  const std::string sample = makers_[worker_id]->in_hand();
  return {.type_name = current_exception_name(),
          .text = (sample.empty() ? "" : "  (" + sample + ")\n") + std::string(what),
          .worker = has_threads_ ? std::to_string(worker_id) : "",
          .cause = std::current_exception()};
}

}  // namespace penstock::loader
