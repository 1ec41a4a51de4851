// SPDX-License-Identifier: Apache-2.0
// How fast do a worker's loops fill a slab, against torch's own operators on the same samples? Penstock's figures are a
// whole batch: its slab, the loop, the record, the trainer's tensors and the slab's way back. Torch's are the operator
// alone, into memory of its own as in a process without workers. One thread, as in a worker; the first iterations fault
// the pages in and are not timed.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "loader/batch.h"
#include "shm/arena.h"
#include "shm/slab_pool.h"
#include "wire/nest.h"
#include "worker/process_memory.h"
#include "worker/slab_writer.h"
#include "worker/stack.h"

namespace penstock {
namespace {

constexpr int kWarmUpCount = 8;

// A worker and its trainer in one process.
class Pool {
 public:
  Pool() {
    worker::tune_malloc();
    at::set_num_threads(1);
    wire::NestWriter nest;
    nest.list(1), nest.tensor(0);
    nest_.assign(nest.view().begin(), nest.view().end());
  }

  worker::SlabWriter& writer() { return writer_; }

  // Hands a batch of one tensor over and drops it again. False without shared memory.
  bool hand_over(const at::Tensor& tensor) {
    const auto sealed = writer_.seal({.tensors = {tensor}, .boundary_keys = {}, .nest = nest_});
    if (!sealed || !sealed.value().region) return false;
    const auto& region = *sealed.value().region;
    auto& view = views_[region.arena->id()];
    if (!view) view = shm::ArenaView::map(FileDescriptor(::dup(region.arena->fd()))).value();
    const uint32_t generation = region.arena->generation(region.slab_index);
    const auto batch = loader::Batch::from_slab(
        {.record_bytes = sealed.value().record_bytes, .record_offset = sealed.value().record_offset},
        c10::make_intrusive<loader::SlabLease>(view, region.slab_index, generation), /*allow_pickle=*/true);
    benchmark::DoNotOptimize(batch.value()->tensors().all().data());
    return true;
  }

 private:
  std::atomic<bool> is_closing_{false};
  shm::SlabPool pool_{{.arena_bytes = 256 << 20, .prefetch_factor = 2}, is_closing_};
  worker::SlabWriter writer_{pool_};
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> views_;
  std::vector<std::byte> nest_;
};

template <typename Make>
void run_penstock(benchmark::State& state, int64_t batch_bytes, Make make) {
  Pool pool;
  const auto run_once = [&] {
    pool.writer().begin();
    return pool.hand_over(make(pool.writer()));
  };
  for (int round = 0; round < kWarmUpCount; ++round) run_once();
  for (auto _ : state) {
    if (!run_once()) state.SkipWithError("no shared memory");
  }
  state.SetBytesProcessed(batch_bytes * state.iterations());
}

template <typename Make>
void run_torch(benchmark::State& state, int64_t batch_bytes, Make make) {
  worker::tune_malloc();
  at::set_num_threads(1);
  for (int round = 0; round < kWarmUpCount; ++round) make();
  for (auto _ : state) benchmark::DoNotOptimize(make());
  state.SetBytesProcessed(batch_bytes * state.iterations());
}

// Samples of `floats` floats each; more of them than a batch has where they are small, so that reading them is not
// free.
std::vector<at::Tensor> make_samples(const benchmark::State& state) {
  std::vector<at::Tensor> samples;
  for (int64_t index = 0; index < state.range(0); ++index) samples.push_back(at::rand({state.range(1)}));
  return samples;
}
int64_t batch_bytes_of(const benchmark::State& state) { return state.range(0) * state.range(1) * 4; }

void BM_StackSamples(benchmark::State& state) {
  const auto samples = make_samples(state);
  run_penstock(state, batch_bytes_of(state),
               [&](worker::SlabWriter& writer) { return worker::stack_samples(writer, samples); });
}
void BM_TorchStack(benchmark::State& state) {
  const auto samples = make_samples(state);
  run_torch(state, batch_bytes_of(state), [&] { return at::stack(samples); });
}
BENCHMARK(BM_StackSamples)->ArgNames({"samples", "floats"})->Args({64, 150'528})->Args({256, 1024})->Args({256, 64});
BENCHMARK(BM_TorchStack)->ArgNames({"samples", "floats"})->Args({64, 150'528})->Args({256, 1024})->Args({256, 64});

// A table of 262,144 rows and shuffled indices of one batch.
struct Table {
  explicit Table(const benchmark::State& state) : rows(at::rand({262'144, state.range(1)})) {
    const at::Tensor shuffled = at::randperm(262'144).slice(0, 0, state.range(0));
    indices.assign(shuffled.const_data_ptr<int64_t>(), shuffled.const_data_ptr<int64_t>() + shuffled.numel());
    index_tensor = shuffled.clone();
  }
  at::Tensor rows;
  std::vector<int64_t> indices;
  at::Tensor index_tensor;
};

void BM_GatherRows(benchmark::State& state) {
  const Table table(state);
  run_penstock(state, batch_bytes_of(state),
               [&](worker::SlabWriter& writer) { return worker::gather_rows(writer, table.rows, table.indices); });
}
void BM_TorchIndexSelect(benchmark::State& state) {
  const Table table(state);
  run_torch(state, batch_bytes_of(state), [&] { return at::index_select(table.rows, 0, table.index_tensor); });
}
BENCHMARK(BM_GatherRows)->ArgNames({"rows", "floats"})->Args({256, 64})->Args({4096, 64});
BENCHMARK(BM_TorchIndexSelect)->ArgNames({"rows", "floats"})->Args({256, 64})->Args({4096, 64});

}  // namespace
}  // namespace penstock
