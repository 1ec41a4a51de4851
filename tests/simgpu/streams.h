// SPDX-License-Identifier: Apache-2.0
#pragma once
// Streams of the simulated GPU. Copies wait in the queue of their stream until their time has come, or until somebody
// waits for them: then they run at once, on the thread that waits. So a program that waits where it has to is not
// slowed down, and one that does not reads too early. One background thread runs what is due.
//
// Thread-safe. Work runs under the lock of all queues: it must not call anything here or in collator.h.

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace simgpu {

inline constexpr c10::DeviceIndex kDeviceCount = 2;
using Clock = std::chrono::steady_clock;

inline c10::Device device_at(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

// A place in a stream: the end of all work that was enqueued before it.
struct Mark {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t sequence = 0;
};

// What an event was recorded at, and when the stream had come there.
struct Recorded {
  Mark mark;
  std::shared_ptr<Clock::time_point> reached_at;  // shared with the work that sets it
};

class Streams {
 public:
  // Never destroyed: tensors are freed while the process ends.
  static Streams& get();

  // Raises where the device was lost, and in a child that was forked after the device was used.
  void check();
  bool is_in_bad_fork() const { return is_in_bad_fork_; }
  bool is_used() const { return is_used_; }

  // Has every call raise from now on, and drops the work that waits; or ends that.
  void set_lost(bool is_lost);
  // How long a copy takes beyond its own time.
  void set_copy_delay(std::chrono::microseconds delay);
  // While held, copies run only when somebody waits for them.
  void set_held(bool is_held);

  c10::Stream current(c10::DeviceIndex device) const;
  c10::Stream exchange(c10::Stream stream);
  c10::Stream make(c10::DeviceIndex device);
  static c10::Stream default_of(c10::DeviceIndex device) {
    return c10::Stream(c10::Stream::DEFAULT, device_at(device));
  }

  void enqueue_copy(c10::Stream stream, std::function<void()> copy);
  Recorded record(c10::Stream stream);
  // Has later work of the stream wait for the mark.
  void wait_for(c10::Stream stream, Mark mark);

  Mark end_of(c10::Stream stream);
  bool is_over(Mark mark);
  // Block until the work has run, which they see to.
  void finish(Mark mark);
  void finish(c10::Stream stream) { finish(end_of(stream)); }
  void finish_all(c10::DeviceIndex device);

 private:
  struct Work {
    std::function<void()> run;
    std::optional<Mark> awaited;
    std::optional<Clock::time_point> due;  // of copies
  };
  struct Queue {
    std::deque<Work> work;
    uint64_t done = 0;
    uint64_t end() const { return done + work.size(); }
  };
  using Lock = std::unique_lock<std::mutex>;

  Streams();
  Queue& queue_of(const Mark& mark) { return queues_[{mark.device, mark.stream}]; }
  static Mark place_in(c10::Stream stream, uint64_t sequence) { return {stream.device_index(), stream.id(), sequence}; }
  void enqueue(c10::Stream stream, Work work);
  void start_runner();
  void run_due(Queue& queue);
  void run_until(Queue& queue, uint64_t sequence);
  void run_head(Queue& queue);
  void raise_if_gone() const;
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue> queues_;
  c10::StreamId last_stream_ = 0;
  std::chrono::microseconds copy_delay_{2000};
  bool is_held_ = false;
  bool is_lost_ = false;
  bool is_used_ = false;
  bool is_in_bad_fork_ = false;
};

}  // namespace simgpu
