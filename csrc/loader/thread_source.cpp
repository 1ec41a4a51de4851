// SPDX-License-Identifier: Apache-2.0
#include "loader/thread_source.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#include "base/process.h"

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
    arrival.batch->record().set_state(made.state);
  } catch (const std::exception& error) {
    arrival.batch = Batch::from_error(facts, describe_exception(worker_id, error.what()));
  } catch (...) {
    arrival.batch = Batch::from_error(facts, describe_exception(worker_id, "not a std::exception"));
  }
  stages_.arrive(std::move(arrival));
}

BatchRecord::RemoteError ThreadSource::describe_exception(uint32_t worker_id, const char* what) const {
  const std::string sample = makers_[worker_id]->in_hand();
  return {.type_name = current_exception_name(),
          .text = (sample.empty() ? "" : "  (" + sample + ")\n") + std::string(what),
          .worker = has_threads_ ? std::to_string(worker_id) : "",
          .cause = std::current_exception()};
}

namespace {

// Smaller blocks are allocated from the heap, which has them readily available.
constexpr uint64_t kRecycledBytesMin = 64 << 10;

}  // namespace

// A block in use by a tensor.
struct RecycledMemory::Loan {
  std::shared_ptr<Blocks> blocks;
  at::DataPtr block;
  uint64_t bytes;
};

at::DataPtr RecycledMemory::Blocks::try_take(uint64_t bytes) {
  MutexLock lock(mutex_);
  const auto found = free_.find(bytes);
  if (found == free_.end() || found->second.empty()) return {};
  at::DataPtr block = std::move(found->second.back());
  found->second.pop_back();
  kept_bytes_ -= bytes;
  return block;
}

void RecycledMemory::Blocks::give_back(at::DataPtr block, uint64_t bytes) {
  std::map<uint64_t, std::vector<at::DataPtr>> dropped;  // freed without the lock
  MutexLock lock(mutex_);
  if (bytes > kept_bytes_max_) return;
  // Drops all blocks, so that blocks of sizes that are no longer requested do not stay.
  if (kept_bytes_ + bytes > kept_bytes_max_) {
    dropped = std::exchange(free_, {});
    kept_bytes_ = 0;
  }
  free_[bytes].push_back(std::move(block));
  kept_bytes_ += bytes;
}

void RecycledMemory::Blocks::close() {
  std::map<uint64_t, std::vector<at::DataPtr>> dropped;
  MutexLock lock(mutex_);
  kept_bytes_max_ = kept_bytes_ = 0;
  dropped = std::exchange(free_, {});
}

uint64_t RecycledMemory::Blocks::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

void RecycledMemory::end_loan(void* loan) {
  const std::unique_ptr<Loan> ended(static_cast<Loan*>(loan));
  ended->blocks->give_back(std::move(ended->block), ended->bytes);
}

at::Tensor RecycledMemory::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const uint64_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  if (bytes < kRecycledBytesMin) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  at::DataPtr block = blocks_->try_take(bytes);
  if (!block) block = c10::GetCPUAllocator()->allocate(bytes);
  void* const data = block.get();
  auto loan = std::make_unique<Loan>(Loan{.blocks = blocks_, .block = std::move(block), .bytes = bytes});
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       at::DataPtr(data, loan.release(), &end_loan, at::kCPU),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         caffe2::TypeMeta::fromScalarType(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace penstock::loader
