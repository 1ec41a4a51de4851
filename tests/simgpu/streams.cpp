// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <thread>
#include <vector>

namespace simgpu {
namespace {

thread_local std::array<c10::StreamId, kDeviceCount> current_streams{};

}  // namespace

Streams& Streams::get() {
  static auto* const streams = std::unique_ptr<Streams>(new Streams).release();
  return *streams;
}

Streams::Streams() {
  // No other thread of a forked child holds the lock, and the child has no device.
  ::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                   [] {
                     get().is_in_bad_fork_ = get().is_used_;
                     get().mutex_.unlock();
                   });
}

void Streams::raise_if_gone() const {
  TORCH_CHECK(!is_in_bad_fork_,
              "Cannot re-initialize simgpu in forked subprocess. To use simgpu with multiprocessing, you must use the "
              "'spawn' start method");
  TORCH_CHECK(!is_lost_, "simgpu error: the device was lost");
}

void Streams::check() {
  const Lock lock(mutex_);
  raise_if_gone();
  is_used_ = true;
}

void Streams::set_lost(bool is_lost) {
  const Lock lock(mutex_);
  is_lost_ = is_lost;
  for (auto& [key, queue] : queues_) {
    queue.done = queue.end();
    queue.work.clear();
  }
}

void Streams::set_copy_delay(std::chrono::microseconds delay) {
  const Lock lock(mutex_);
  copy_delay_ = delay;
}

void Streams::set_held(bool is_held) {
  const Lock lock(mutex_);
  is_held_ = is_held;
  changed_.notify_all();
}

c10::Stream Streams::current(c10::DeviceIndex device) const {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), current_streams.at(static_cast<size_t>(device)));
}

c10::Stream Streams::exchange(c10::Stream stream) {
  const c10::Stream before = current(stream.device_index());
  current_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return before;
}

c10::Stream Streams::make(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  raise_if_gone();
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), ++last_stream_);
}

void Streams::enqueue_copy(c10::Stream stream, std::function<void()> copy) {
  const Lock lock(mutex_);
  raise_if_gone();
  start_runner();
  enqueue(stream, {.run = std::move(copy), .awaited = {}, .due = Clock::now() + copy_delay_});
}

Recorded Streams::record(c10::Stream stream) {
  const Lock lock(mutex_);
  raise_if_gone();
  auto reached_at = std::make_shared<Clock::time_point>();
  enqueue(stream, {.run = [reached_at] { *reached_at = Clock::now(); }, .awaited = {}, .due = {}});
  return {place_in(stream, queues_[{stream.device_index(), stream.id()}].end()), std::move(reached_at)};
}

void Streams::wait_for(c10::Stream stream, Mark mark) {
  const Lock lock(mutex_);
  raise_if_gone();
  enqueue(stream, {.run = [] {}, .awaited = mark, .due = {}});
}

void Streams::enqueue(c10::Stream stream, Work work) {
  Queue& queue = queues_[{stream.device_index(), stream.id()}];
  queue.work.push_back(std::move(work));
  run_due(queue);
  changed_.notify_all();
}

Mark Streams::end_of(c10::Stream stream) {
  const Lock lock(mutex_);
  return place_in(stream, queues_[{stream.device_index(), stream.id()}].end());
}

bool Streams::is_over(Mark mark) {
  const Lock lock(mutex_);
  raise_if_gone();
  return queue_of(mark).done >= mark.sequence;
}

void Streams::finish(Mark mark) {
  const Lock lock(mutex_);
  raise_if_gone();
  run_until(queue_of(mark), mark.sequence);
}

void Streams::finish_all(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  raise_if_gone();
  for (auto& [key, queue] : queues_) {
    if (key.first == device) run_until(queue, queue.end());
  }
}

void Streams::run_head(Queue& queue) {
  const Work work = std::move(queue.work.front());
  queue.work.pop_front();
  work.run();
  ++queue.done;
}

// A mark is awaited only after it was made, so this ends.
void Streams::run_until(Queue& queue, uint64_t sequence) {
  while (queue.done < sequence) {
    if (const auto awaited = queue.work.front().awaited) run_until(queue_of(*awaited), awaited->sequence);
    run_head(queue);
  }
}

void Streams::run_due(Queue& queue) {
  while (!queue.work.empty()) {
    const Work& head = queue.work.front();
    if (head.awaited && queue_of(*head.awaited).done < head.awaited->sequence) return;
    if (head.due && (is_held_ || *head.due > Clock::now())) return;
    run_head(queue);
  }
}

// Detached, since it belongs to the process: a device has no owner that could join it, and what it uses is never
// destroyed.
void Streams::start_runner() {
  static std::once_flag once;
  std::call_once(once, [this] { std::thread([this] { serve(); }).detach(); });
}

void Streams::serve() {
  Lock lock(mutex_);
  while (true) {
    auto next = Clock::now() + std::chrono::hours(1);
    // A queue may wait for one that comes later.
    for (size_t round = 0; round < queues_.size(); ++round) {
      for (auto& [key, queue] : queues_) run_due(queue);
    }
    for (const auto& [key, queue] : queues_) {
      if (!queue.work.empty() && queue.work.front().due && !is_held_) next = std::min(next, *queue.work.front().due);
    }
    changed_.wait_until(lock, next);
  }
}

}  // namespace simgpu
