// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device without hardware: its memory is the host's, and a thread of its own carries out copies when the test lets
// it, in the order in which they were started or in another. It reads sources by their address alone, so a slab that
// goes back too early shows as a wrong batch and to the thread sanitizer. It widens with the threads of the kernels,
// one after the other.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../wire/widen_grid.h"
#include "base/mutex.h"
#include "device/device.h"

namespace penstock::loader {

// The memory that a fake reads by itself. Thread-safe.
class FakeRegistrations {
 public:
  void refuse() {
    const MutexLock lock(mutex_);
    are_refused_ = true;
  }
  bool add(std::span<std::byte> memory) {
    const MutexLock lock(mutex_);
    if (are_refused_) return false;
    EXPECT_TRUE(registered_.insert(memory.data()).second) << "registered twice";
    ++count_;
    return true;
  }
  void remove(std::byte* base) {
    const MutexLock lock(mutex_);
    EXPECT_EQ(registered_.erase(base), 1u) << "was not registered";
  }
  std::set<std::byte*> registered() {
    const MutexLock lock(mutex_);
    return registered_;
  }
  // Those that were removed included.
  size_t count() {
    const MutexLock lock(mutex_);
    return count_;
  }

 private:
  Mutex mutex_;
  std::set<std::byte*> registered_ PENSTOCK_GUARDED_BY(mutex_);
  size_t count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  bool are_refused_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

// What the test holds on to while a stage owns the FakeDevice in front of it. Thread-safe.
class FakeGpu {
 public:
  FakeGpu() : thread_([this](const std::stop_token& stop) { run(stop); }) {}
  ~FakeGpu() {
    change([&] {
      is_held_ = false;
      thread_.request_stop();
    });
  }

  // Copies begin only after let_go(), or when somebody waits for all of them.
  void hold() {
    change([&] { is_held_ = true; });
  }
  void let_go() {
    change([&] { is_held_ = false; });
  }
  // Work of different batches ends in any order from now on.
  void shuffle(uint64_t seed) {
    change([&] { order_.emplace(seed); });
  }
  // Carries out one batch's copies, although they are held: that of the batch `index` of those under way.
  void let_one_go(size_t index) {
    change([&] { let_go_.insert(in_progress_.at(index).number); });
  }
  void wait_until_idle() {
    const MutexLock lock(mutex_);
    while (!is_idle()) changed_.wait(mutex_);
  }

  // The next queries fail, although nothing is wrong with the copies.
  void fail_queries(int count) {
    change([&] { failing_query_count_ = count; });
  }
  // The copy after `count` others fails after it was started.
  void fail_copy_after(int count) {
    change([&] { copies_to_failure_ = count; });
  }
  // As of a build without kernels. To be called before a stage is made.
  void take_kernels_away() {
    change([&] { can_widen_ = false; });
  }
  // The widening after `count` others fails after it was started.
  void fail_widening_after(int count) {
    change([&] { widenings_to_failure_ = count; });
  }
  void fail_records(int count) {
    change([&] { failing_record_count_ = count; });
  }
  void refuse_registrations() { registrations_.refuse(); }
  // Every call fails from now on. Copies that were started go on, also those that no event will stand behind.
  void lose() {
    change([&] {
      is_lost_ = true;
      if (!open_.empty()) close_open(nullptr);
    });
  }
  void set_memory_bytes(uint64_t bytes) { memory_->capacity_bytes = bytes; }
  uint64_t used_bytes() const { return memory_->used_bytes; }

  // Called by who waits for all copies, before they are let go.
  void at_wait(std::function<void()> look) {
    change([&] { at_wait_ = std::move(look); });
  }

  std::set<std::byte*> registered() { return registrations_.registered(); }
  size_t registration_count() { return registrations_.count(); }
  size_t widened_count() {
    const MutexLock lock(mutex_);
    return widened_count_;
  }
  size_t handed_over_count() {
    const MutexLock lock(mutex_);
    return handed_over_count_;
  }

  // Carries something out on the trainer's current stream, behind all that the stream waits for. Does not block.
  void run_on_current(std::function<void()> action) {
    change([&] { current_.push_back({.awaited = nullptr, .action = std::move(action)}); });
  }

 private:
  friend class FakeDevice;

  struct Event final : public device::DeviceEvent {
    std::atomic<bool> is_over = false;
  };
  // A copy, or with a widening that of `narrow`. Keeps the memory of tensors, as a device does for work on its stream.
  struct Work {
    const void* source = nullptr;
    at::Tensor target;
    std::optional<wire::Widening> widening{};
    at::Tensor narrow{};
    at::Tensor scratch{};
  };
  struct BatchWork {
    uint64_t number = 0;
    std::vector<Work> works;
    std::shared_ptr<Event> event;  // shared with the stage and the batch
  };
  struct CurrentWork {
    std::shared_ptr<const Event> awaited;
    std::function<void()> action;
  };
  // Shared with the tensors on the device.
  struct Memory {
    std::atomic<uint64_t> capacity_bytes = UINT64_MAX;
    std::atomic<uint64_t> used_bytes = 0;
  };

  template <typename Change>
  void change(Change make_change) {
    {
      const MutexLock lock(mutex_);
      make_change();
    }
    changed_.notify_all();
  }

  // The copies that were started since the last event are under way, with this one behind them or none.
  void close_open(std::shared_ptr<Event> event) {
    in_progress_.push_back({.number = next_number_++, .works = std::exchange(open_, {}), .event = std::move(event)});
  }

  bool is_idle() const { return in_progress_.empty() && open_.empty() && current_.empty() && !is_busy_; }

  std::optional<size_t> find_runnable() {
    std::vector<size_t> candidates;
    for (size_t index = 0; index < in_progress_.size(); ++index) {
      if (!is_held_ || let_go_.contains(in_progress_[index].number)) candidates.push_back(index);
    }
    if (candidates.empty()) return std::nullopt;
    if (!order_) return candidates.front();
    return candidates[(*order_)() % candidates.size()];
  }

  void run(const std::stop_token& stop) {
    for (;;) {
      std::optional<BatchWork> batch;
      std::optional<CurrentWork> action;
      {
        const MutexLock lock(mutex_);
        for (;;) {
          if (!current_.empty() && (!current_.front().awaited || current_.front().awaited->is_over)) {
            action = std::move(current_.front());
            current_.pop_front();
            break;
          }
          if (const auto index = find_runnable()) {
            batch = std::move(in_progress_[*index]);
            in_progress_.erase(in_progress_.begin() + static_cast<ptrdiff_t>(*index));
            break;
          }
          if (stop.stop_requested()) return;
          changed_.wait(mutex_);
        }
        is_busy_ = true;
      }
      if (batch) {
        for (const Work& work : batch->works) carry_out(work);
        if (batch->event) batch->event->is_over = true;
        batch.reset();
      }
      if (action && action->action) action->action();
      action.reset();
      change([&] { is_busy_ = false; });
    }
  }

  static void carry_out(const Work& work) {
    auto* const target = static_cast<std::byte*>(work.target.mutable_data_ptr());
    if (!work.widening) {
      std::memcpy(target, work.source, work.target.storage().nbytes());
      return;
    }
    if (work.scratch.defined()) std::memset(work.scratch.mutable_data_ptr(), 0xdd, work.scratch.storage().nbytes());
    wire::widen_on_grid(*work.widening, static_cast<const std::byte*>(work.narrow.const_data_ptr()), target);
  }

  // Guards all below but the memory. Not annotated: the changes are lambdas, which the analysis does not follow.
  Mutex mutex_;
  Condition changed_;
  bool is_held_ = false;
  bool is_lost_ = false;
  bool is_busy_ = false;
  int failing_query_count_ = 0;
  int failing_record_count_ = 0;
  bool can_widen_ = true;
  std::optional<int> copies_to_failure_;
  std::optional<int> widenings_to_failure_;
  size_t widened_count_ = 0;
  std::optional<std::mt19937_64> order_;
  std::set<uint64_t> let_go_;
  uint64_t next_number_ = 0;
  std::function<void()> at_wait_;
  std::vector<Work> open_;  // started, with no event behind them yet
  std::deque<BatchWork> in_progress_;
  std::deque<CurrentWork> current_;
  size_t handed_over_count_ = 0;
  FakeRegistrations registrations_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  std::jthread thread_;
};

class FakeDevice final : public device::Device {
 public:
  explicit FakeDevice(FakeGpu& gpu) : gpu_(gpu) {}

  std::string name() const override { return "fake:0"; }

  Result<at::Tensor> allocate(const at::Tensor& like) override {
    const uint64_t bytes = like.storage().nbytes();
    const auto memory = gpu_.memory_;
    if (memory->used_bytes + bytes > memory->capacity_bytes) return Fault{Errc::kNoMemory, "the fake is full"};
    memory->used_bytes += bytes;
    const auto owner = std::make_shared<std::vector<std::byte>>(bytes, std::byte{0xee});
    return at::from_blob(
        owner->data(), like.sizes(), like.strides(), [owner, memory, bytes](void*) { memory->used_bytes -= bytes; },
        like.options().device(at::kCPU));
  }

  bool register_memory(std::span<std::byte> memory) override { return gpu_.registrations_.add(memory); }
  void unregister_memory(std::byte* base) override { gpu_.registrations_.remove(base); }

  Result<void> copy(const at::Tensor& host, const at::Tensor& on_device) override {
    const MutexLock lock(gpu_.mutex_);
    if (gpu_.is_lost_) return lost();
    gpu_.open_.push_back({.source = host.const_data_ptr(), .target = on_device});
    if (gpu_.copies_to_failure_ && (*gpu_.copies_to_failure_)-- == 0) {
      gpu_.copies_to_failure_.reset();
      return Fault{Errc::kFailed, "the fake's copy failed"};
    }
    return {};
  }

  bool can_widen() const override {
    const MutexLock lock(gpu_.mutex_);
    return gpu_.can_widen_;
  }

  Result<uint64_t> scratch_bytes(const wire::Widening& widening) override {
    return widening.encoding == wire::Encoding::kPadded ? widening.row_count * sizeof(uint64_t) : 0;
  }

  Result<void> widen(const wire::Widening& widening, const at::Tensor& narrow, const at::Tensor& scratch,
                     const at::Tensor& target) override {
    EXPECT_EQ(scratch.defined() ? scratch.storage().nbytes() : 0, scratch_bytes(widening).value());
    EXPECT_EQ(target.storage().nbytes(), widening.plain_bytes());
    const MutexLock lock(gpu_.mutex_);
    if (gpu_.is_lost_) return lost();
    EXPECT_TRUE(gpu_.can_widen_);
    gpu_.open_.push_back({.target = target, .widening = widening, .narrow = narrow, .scratch = scratch});
    ++gpu_.widened_count_;
    if (gpu_.widenings_to_failure_ && (*gpu_.widenings_to_failure_)-- == 0) {
      gpu_.widenings_to_failure_.reset();
      return Fault{Errc::kFailed, "the fake's kernel failed"};
    }
    return {};
  }

  Result<std::shared_ptr<device::DeviceEvent>> record() override {
    auto event = std::make_shared<FakeGpu::Event>();
    bool is_refused = false;
    gpu_.change([&] {
      is_refused = gpu_.is_lost_ || gpu_.failing_record_count_-- > 0;
      if (!is_refused) close_open(event);
    });
    if (is_refused) return Fault{Errc::kFailed, "the fake records nothing"};
    return std::shared_ptr<device::DeviceEvent>(std::move(event));
  }

  Result<bool> is_over(const device::DeviceEvent& event) override {
    const MutexLock lock(gpu_.mutex_);
    if (gpu_.is_lost_) return lost();
    if (gpu_.failing_query_count_-- > 0) return Fault{Errc::kFailed, "the fake answers no query"};
    return static_cast<const FakeGpu::Event&>(event).is_over.load();
  }

  Result<void> wait_for(const device::DeviceEvent& event) override {
    const auto& awaited = static_cast<const FakeGpu::Event&>(event);
    gpu_.change([&] {
      for (const auto& batch : gpu_.in_progress_) gpu_.let_go_.insert(batch.number);
    });
    const MutexLock lock(gpu_.mutex_);
    while (!awaited.is_over.load() && !gpu_.is_lost_) gpu_.changed_.wait(gpu_.mutex_);
    if (gpu_.is_lost_) return lost();
    return {};
  }

  Result<void> wait_for_all() override {
    std::function<void()> at_wait;
    bool is_lost = false;
    gpu_.change([&] {
      at_wait = gpu_.at_wait_;
      is_lost = gpu_.is_lost_;
    });
    if (at_wait) at_wait();
    if (is_lost) return lost();
    gpu_.change([&] {
      close_open(nullptr);
      for (const auto& batch : gpu_.in_progress_) gpu_.let_go_.insert(batch.number);
    });
    const MutexLock lock(gpu_.mutex_);
    while (!gpu_.in_progress_.empty() || gpu_.is_busy_) gpu_.changed_.wait(gpu_.mutex_);
    return {};
  }

  Result<void> hand_over(const device::DeviceEvent& event, std::span<const at::Tensor> tensors) override {
    bool is_lost = false;
    gpu_.change([&] {
      is_lost = gpu_.is_lost_;
      if (is_lost) return;
      // The batch's own event would do, but a caller may drop it now.
      const auto* awaited = static_cast<const FakeGpu::Event*>(&event);
      gpu_.current_.push_back({.awaited = find_event(awaited), .action = {}});
      gpu_.handed_over_count_ += tensors.size();
    });
    if (is_lost) return lost();
    return {};
  }

 private:
  static Fault lost() { return {Errc::kFailed, "the fake is lost"}; }

  void close_open(std::shared_ptr<FakeGpu::Event> event) {
    gpu_.close_open(event);
    std::erase_if(events_, [](const auto& known) { return known.expired(); });
    if (event) events_.push_back(event);
  }

  std::shared_ptr<const FakeGpu::Event> find_event(const FakeGpu::Event* wanted) const {
    for (const auto& known : events_) {
      if (auto event = known.lock(); event.get() == wanted) return event;
    }
    return nullptr;
  }

  FakeGpu& gpu_;
  std::vector<std::weak_ptr<FakeGpu::Event>> events_;
};

// Registered memory whose reads the test begins and ends. Reads that are waited for end. Thread-safe.
class FakeWatch {
 public:
  // The memory that a stage owns. May outlive this object only with nothing registered.
  std::unique_ptr<device::WatchedMemory> open() { return std::make_unique<Memory>(*this); }

  void begin_read(std::byte* base) {
    const MutexLock lock(mutex_);
    ++reads_[base];
  }
  void end_reads(std::byte* base) {
    const MutexLock lock(mutex_);
    reads_.erase(base);
  }
  void lose_track(std::byte* base) {
    const MutexLock lock(mutex_);
    unknown_.insert(base);
  }
  void refuse_registrations() { registrations_.refuse(); }
  std::set<std::byte*> registered() { return registrations_.registered(); }
  size_t registration_count() { return registrations_.count(); }
  size_t wait_count() {
    const MutexLock lock(mutex_);
    return wait_count_;
  }

 private:
  class Memory final : public device::WatchedMemory {
   public:
    explicit Memory(FakeWatch& watch) : watch_(watch) {}

    bool register_memory(std::span<std::byte> memory) override { return watch_.registrations_.add(memory); }
    void unregister_memory(std::byte* base) override {
      watch_.registrations_.remove(base);
      const MutexLock lock(watch_.mutex_);
      EXPECT_FALSE(watch_.reads_.contains(base)) << "a copy still reads it";
    }
    Reads reads(std::byte* base) override {
      const MutexLock lock(watch_.mutex_);
      if (watch_.unknown_.contains(base)) return Reads::kUnknown;
      return watch_.reads_.contains(base) ? Reads::kInProgress : Reads::kNone;
    }
    Reads wait_for_reads(std::byte* base) override {
      const MutexLock lock(watch_.mutex_);
      if (watch_.unknown_.contains(base)) return Reads::kUnknown;
      watch_.wait_count_ += watch_.reads_.erase(base);
      return Reads::kNone;
    }

   private:
    FakeWatch& watch_;
  };

  Mutex mutex_;
  std::map<std::byte*, int> reads_ PENSTOCK_GUARDED_BY(mutex_);
  std::set<std::byte*> unknown_ PENSTOCK_GUARDED_BY(mutex_);
  FakeRegistrations registrations_;
  size_t wait_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::loader
