// SPDX-License-Identifier: Apache-2.0
// What does a batch cost beside its bytes: its record, its nest, and the way of a slab from a worker to its trainer and
// back? The hand-over runs between two processes over a channel, as with a local worker; one iteration is a request, an
// answer and a release, with one slab, so it is a latency and not a rate.
#include <benchmark/benchmark.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/frame.h"
#include "wire/job_record.h"
#include "wire/nest.h"

namespace penstock {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using wire::FromJob;
using wire::ToJob;

// A record of `tensor_count` float32 tensors of [64, 3, 224, 224].
std::vector<std::byte> make_record(int64_t tensor_count) {
  wire::NestWriter nest;
  nest.list(static_cast<uint32_t>(tensor_count));
  wire::Frame frame;
  for (int64_t index = 0; index < tensor_count; ++index) {
    nest.tensor(static_cast<uint32_t>(index));
    wire::TensorEntry entry{
        .dtype = wire::kDTypeFloat32, .shape = {64, 3, 224, 224}, .strides = {150'528, 50'176, 224, 1}};
    entry.bytes = wire::span_bytes(entry.dtype, entry.shape, entry.strides).value();
    entry.offset = frame.payload_bytes;
    frame.payload_bytes += align_up(entry.bytes, wire::kPayloadAlignment);
    frame.tensors.push_back(std::move(entry));
  }
  frame.nest = nest.view();
  return wire::write_frame(frame);
}

void BM_WriteRecord(benchmark::State& state) {
  const auto record = make_record(state.range(0));
  const wire::Frame frame = wire::parse_frame(record).value();
  for (auto _ : state) benchmark::DoNotOptimize(wire::write_frame(frame));
  state.SetBytesProcessed(static_cast<int64_t>(record.size()) * state.iterations());
}
BENCHMARK(BM_WriteRecord)->ArgName("tensors")->Arg(1)->Arg(16)->Arg(256);

void BM_ParseRecord(benchmark::State& state) {
  const auto record = make_record(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(wire::parse_frame(record));
  state.SetBytesProcessed(static_cast<int64_t>(record.size()) * state.iterations());
}
BENCHMARK(BM_ParseRecord)->ArgName("tensors")->Arg(1)->Arg(16)->Arg(256);

// A list of dicts of three entries, as a dataset of annotations has them.
void write_annotations(wire::NestWriter& nest, int64_t count) {
  nest.clear();
  nest.list(static_cast<uint32_t>(count));
  for (int64_t index = 0; index < count; ++index) {
    nest.dict(3);
    nest.text("image"), nest.tensor(0);
    nest.text("label"), nest.integer(index);
    nest.text("weight"), nest.floating(0.5);
  }
}

void BM_WriteNest(benchmark::State& state) {
  for (auto _ : state) {
    wire::NestWriter nest;
    write_annotations(nest, state.range(0));
    benchmark::DoNotOptimize(nest.view().data());
  }
  state.SetItemsProcessed(state.range(0) * state.iterations());
}
BENCHMARK(BM_WriteNest)->ArgName("dicts")->Arg(1)->Arg(512);

void BM_CheckNest(benchmark::State& state) {
  wire::NestWriter nest;
  write_annotations(nest, state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(wire::check_nest(nest.view(), 1, /*allow_pickle=*/true));
  state.SetItemsProcessed(state.range(0) * state.iterations());
}
BENCHMARK(BM_CheckNest)->ArgName("dicts")->Arg(1)->Arg(512);

void BM_AcquireAndRelease(benchmark::State& state) {
  const auto arena = shm::Arena::create({.slab_bytes = 1 << 20, .slab_count = 4}, 0).value();
  const auto view = shm::ArenaView::map(FileDescriptor(::dup(arena->fd()))).value();
  for (auto _ : state) {
    const uint32_t slab_index = arena->try_acquire().value();
    view->release(slab_index, arena->generation(slab_index));
  }
}
BENCHMARK(BM_AcquireAndRelease);

// Sends a message that is its head alone.
bool send_head(shm::Channel& channel, std::span<const std::byte> head, std::span<const int> fds = {}) {
  return static_cast<bool>(channel.send({&head, 1}, fds));
}

steady_clock::time_point soon() { return steady_clock::now() + seconds(10); }

// The worker's process: names its slab to the trainer whenever it is asked, until it is asked for the last time.
[[noreturn]] void serve(shm::Channel channel) {
  const auto arena = shm::Arena::create({.slab_bytes = 1 << 20, .slab_count = 1}, 0).value();
  const int fd = arena->fd();
  bool is_well = send_head(channel, wire::from_job_head({.kind = FromJob::Kind::kReady}), {&fd, 1});
  while (is_well) {
    const auto message = channel.receive(soon());
    if (!message) break;
    const ToJob request = wire::parse_to_job(message.value().bytes).value();
    if (request.kind != ToJob::Kind::kWork) ::_exit(EXIT_SUCCESS);
    const wire::BatchKey key = request.key;
    auto slab_index = arena->try_acquire();
    while (!slab_index) {
      arena->wait_for_release(std::chrono::milliseconds(100));
      slab_index = arena->try_acquire();
    }
    const FromJob answer{.answer = wire::AnswerKind::kBatch,
                         .key = key,
                         .record_bytes = 1,
                         .payload_bytes = 1,
                         .place = wire::SlabPlace{.slab_index = *slab_index, .generation = arena->generation(0)}};
    is_well = send_head(channel, wire::from_job_head(answer));
  }
  ::_exit(EXIT_FAILURE);
}

void BM_SlabHandOver(benchmark::State& state) {
  auto ends = shm::Channel::open_pair();
  if (!ends) return state.SkipWithError("no socket");
  const pid_t worker = ::fork();
  if (worker == 0) {
    ends.value().here.reset();
    serve(shm::Channel(std::move(ends.value().there)));
  }
  ends.value().there.reset();
  shm::Channel channel(std::move(ends.value().here));
  const auto hello = channel.receive(soon());
  const auto view =
      hello ? shm::ArenaView::map(hello.value().fds.front()) : Result<std::shared_ptr<shm::ArenaView>>(hello.error());
  bool is_well = static_cast<bool>(view);
  uint64_t sequence = 0;
  for (auto _ : state) {
    is_well = is_well && send_head(channel, wire::to_job_head({.key = {.sequence = sequence++}}));
    const auto answer = is_well ? channel.receive(soon()) : Result<shm::Channel::Message>(Fault{Errc::kClosed, ""});
    if (!answer) {
      state.SkipWithError("the worker does not answer");
      break;
    }
    const wire::SlabPlace place = wire::parse_from_job(answer.value().bytes).value().place.value();
    view.value()->release(place.slab_index, place.generation);
  }
  static_cast<void>(send_head(channel, wire::to_job_head({.kind = ToJob::Kind::kEpoch})));
  int status = 0;
  ::waitpid(worker, &status, 0);
}
BENCHMARK(BM_SlabHandOver)->UseRealTime();

}  // namespace
}  // namespace penstock
