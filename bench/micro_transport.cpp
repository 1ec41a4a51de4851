// SPDX-License-Identifier: Apache-2.0
// What does a batch cost beside its bytes: its record, its nest, and the way of a slab from a worker to its trainer and
// back? The hand-over runs between two processes over the sockets of a real pool; one iteration is a request, a
// descriptor and a release, with one slab, so it is a latency and not a rate.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "base/identity.h"
#include "net/socket.h"
#include "shm/arena.h"
#include "shm/fd_channel.h"
#include "wire/frame.h"
#include "wire/message.h"
#include "wire/nest.h"

namespace penstock {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

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

// Waits for the next message; false when the peer is silent for ten seconds.
bool receive(net::Socket& socket, net::MessageParts& parts) {
  net::Socket* const sockets[] = {&socket};
  for (int tried = 0; tried < 100; ++tried) {
    const auto received = socket.try_receive(parts);
    if (!received) return false;
    if (received.value()) return true;
    if (!net::Socket::wait(sockets, {}, {}, std::chrono::milliseconds(100))) return false;
  }
  return false;
}

// The worker's process: names its slab to the trainer whenever it is asked, until it is asked for the last time.
[[noreturn]] void serve(shm::FdConnection connection, const std::string& name) {
  net::SocketContext context;
  const auto socket = net::Socket::connect(context, name).value();
  const auto arena = shm::Arena::create({.slab_bytes = 1 << 20, .slab_count = 1}, 0).value();
  bool is_well = static_cast<bool>(connection.send({.kind = shm::kFdArena}, arena->fd()));
  is_well = is_well && socket->wait_writable(seconds(10)) && socket->send(wire::write_message(wire::Descriptor{}));
  net::MessageParts parts;
  while (is_well && receive(*socket, parts)) {
    const wire::Request request = wire::parse_request(parts.front()).value();
    if (request.kind != wire::RequestKind::kFetch) ::_exit(EXIT_SUCCESS);
    auto slab_index = arena->try_acquire();
    while (!slab_index) {
      arena->wait_for_release(std::chrono::milliseconds(100));
      slab_index = arena->try_acquire();
    }
    is_well =
        static_cast<bool>(socket->send(wire::write_message(wire::Descriptor{.kind = wire::DescriptorKind::kSlab,
                                                                            .sequence = request.sequence,
                                                                            .slab_index = *slab_index,
                                                                            .slab_generation = arena->generation(0)})));
  }
  ::_exit(EXIT_FAILURE);
}

void BM_SlabHandOver(benchmark::State& state) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return state.SkipWithError("socketpair");
  const std::string name = make_endpoint_name();
  const pid_t worker = ::fork();  // before the trainer's context, whose threads a child does not have
  if (worker == 0) serve(shm::FdConnection(FileDescriptor(ends[1])), name);
  ::close(ends[1]);
  shm::FdConnection connection{FileDescriptor(ends[0])};
  net::SocketContext context;
  const auto socket = net::Socket::bind(context, name).value();
  const auto passed = connection.receive(steady_clock::now() + seconds(10));
  const auto view =
      passed ? shm::ArenaView::map(passed.value().fd) : Result<std::shared_ptr<shm::ArenaView>>(passed.error());
  net::MessageParts parts;
  bool is_well = view && receive(*socket, parts);
  uint64_t sequence = 0;
  for (auto _ : state) {
    is_well =
        is_well && socket->send(wire::write_message(wire::Request{.sequence = sequence++})) && receive(*socket, parts);
    if (!is_well) {
      state.SkipWithError("the worker does not answer");
      break;
    }
    const wire::Descriptor descriptor = wire::parse_descriptor(parts.front()).value();
    view.value()->release(descriptor.slab_index, descriptor.slab_generation);
  }
  static_cast<void>(socket->send(wire::write_message(wire::Request{.kind = wire::RequestKind::kEpoch})));
  int status = 0;
  ::waitpid(worker, &status, 0);
}
BENCHMARK(BM_SlabHandOver)->UseRealTime();

}  // namespace
}  // namespace penstock
