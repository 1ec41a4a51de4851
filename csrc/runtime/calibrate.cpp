// SPDX-License-Identifier: Apache-2.0
#include "runtime/calibrate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/mutex.h"
#include "capture/schema.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"

namespace penstock::runtime {
namespace {

using graph::ValueId;

// For nodes that are not timed: the time to start a kernel, and the memory bandwidth of a small device.
constexpr double kKernelStartS = 8e-6;
constexpr double kDeviceBytesPerS = 500e9;
constexpr int64_t kCopiedBytes = int64_t{2} << 20;

int64_t bytes_of(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? static_cast<int64_t>(value.toTensor().nbytes()) : 0;
}

double estimate(const graph::Node& node, const Frame& values) {
  int64_t bytes = 0;
  graph::for_each_operand(node, [&](ValueId value) { bytes += bytes_of(values[value]); });
  for (const ValueId value : node.results) bytes += bytes_of(values[value]);
  return kKernelStartS + static_cast<double>(bytes) / kDeviceBytesPerS;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The current stream of one device. Throws torch's exceptions.
class Timeline {
 public:
  explicit Timeline(c10::Device device)
      : guard_(device), stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)) {}

  // Returns the seconds that the device takes for the work that `start` launches: the median of some runs, after one
  // that does not count.
  template <typename Start>
  double seconds(int round_count, const Start& start) const {
    std::vector<double> seconds;
    start();
    for (int round = 0; round < std::max(1, round_count); ++round) {
      c10::Event begin(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);
      c10::Event end(stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT);
      begin.record(stream_);
      start();
      end.record(stream_);
      end.synchronize();
      seconds.push_back(begin.elapsedTime(end) * 1e-3);
    }
    return median(std::move(seconds));
  }

 private:
  const c10::DeviceGuard guard_;
  const c10::Stream stream_;
};

at::Tensor copied_to(c10::Device device, const at::Tensor& tensor) {
  return tensor.to(tensor.options().device(device), /*non_blocking=*/false, /*copy=*/true);
}

// The values of a run on a device: copies of the host's values, made when a node reads them there.
class DeviceFrame {
 public:
  explicit DeviceFrame(const Frame& values) : values_(values), frame_(values.size()) {}

  // Puts the operands of a node into the frame as the node reads them on the device.
  void fill(const graph::Node& node, c10::Device device) {
    const graph::OnDevice& on = *node.on;
    size_t place = 0;
    graph::for_each_operand(node, [&](ValueId value) {
      const bool is_on_host = place < on.operands.size() && on.operands[place].is_on_host;
      ++place;
      frame_[value] = is_on_host ? values_[value] : on_device(value, device);
    });
  }

  Frame& frame() { return frame_; }

  void free(std::span<const ValueId> dead) {
    for (const ValueId value : dead) {
      copies_.erase(value);
      frame_[value] = c10::IValue();
    }
  }

 private:
  c10::IValue on_device(ValueId value, c10::Device device) {
    const c10::IValue& on_host = values_[value];
    if (on_host.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : on_host.toTensorVector()) list.push_back(copied_to(device, tensor));
      return list;
    }
    if (!on_host.isTensor() || !on_host.toTensor().defined()) return on_host;
    auto found = copies_.find(value);
    if (found == copies_.end()) found = copies_.emplace(value, copied_to(device, on_host.toTensor())).first;
    return found->second;
  }

  const Frame& values_;
  Frame frame_;
  std::map<ValueId, at::Tensor> copies_;
};

bool reads_host_alone(const graph::Node& node) {
  return std::ranges::all_of(node.on->operands, &graph::OperandForm::is_on_host);
}

std::optional<double> time_node(const graph::Node& node, DeviceFrame& device_frame, c10::Device device,
                                int round_count) {
  graph::Node here = node;
  here.on.reset();
  auto call = OperatorCall::prepare(here);
  if (!call) return std::nullopt;
  try {
    const Timeline timeline(device);
    device_frame.fill(node, device);
    c10::Stack stack;
    bool has_run = true;
    const double seconds = timeline.seconds(
        round_count, [&] { has_run = has_run && static_cast<bool>(call.value().run(device_frame.frame(), stack)); });
    if (has_run) return seconds;
  } catch (const c10::Error&) {
    // For example, too little memory: the time stays an estimate.
  }
  return std::nullopt;
}

double time_empty_call(c10::Device device, int round_count) {
  try {
    return Timeline(device).seconds(round_count, [] {});
  } catch (const c10::Error&) {
    return 0;
  }
}

// Returns bytes per second; 0 if the device or its memory cannot be measured.
double measured_copy_rate(c10::Device device, int round_count, double empty_call_s) {
  try {
    const at::Tensor source = at::empty({kCopiedBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    const at::Tensor target = at::empty({kCopiedBytes}, at::TensorOptions(at::kByte).device(device));
    const double seconds =
        Timeline(device).seconds(round_count, [&] { target.copy_(source, /*non_blocking=*/true); }) - empty_call_s;
    return seconds > 0 ? static_cast<double>(kCopiedBytes) / seconds : 0;
  } catch (const c10::Error&) {
    return 0;
  }
}

// Measures once per process, if that succeeds: the rate is a property of the machine, and measuring it costs memory and
// copies.
double copy_rate(c10::Device device, int round_count, double empty_call_s) {
  static Mutex mutex;
  static std::map<std::string, double> rates;
  const MutexLock lock(mutex);
  double& rate = rates[device.str()];
  if (rate == 0) rate = measured_copy_rate(device, round_count, empty_call_s);
  return rate;
}

}  // namespace

DeviceTimes time_on_devices(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Frame& values,
                            int round_count) {
  DeviceTimes times{.node_s = std::vector<double>(graph.nodes.size(), 0.0), .copy_bytes_per_s = 0};
  DeviceFrame device_frame(values);
  const std::vector<std::vector<ValueId>> dead = last_uses(graph);
  std::map<std::string, double> empty_call_s;  // by device: the time between two consecutive events
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const graph::Node& node = graph.nodes[i];
    if (!node.on || !verdicts[i].movable) continue;
    times.node_s[i] = estimate(node, values);
    const std::optional<c10::Device> device = capture::accelerator_of(node.on->device);
    if (!device || graph.traits[i].purity == graph::Purity::kRandom) continue;
    const auto [nothing, is_new] = empty_call_s.try_emplace(device->str(), 0.0);
    if (is_new) {
      nothing->second = time_empty_call(*device, round_count);
      times.copy_bytes_per_s = copy_rate(*device, round_count, nothing->second);
    }
    if (reads_host_alone(node)) continue;  // a copy to the device, made ahead of time
    if (const auto seconds = time_node(node, device_frame, *device, round_count))
      times.node_s[i] = std::max(0.0, *seconds - nothing->second);
    device_frame.free(dead[i]);
  }
  return times;
}

namespace {

using graph::ValueId;
using Clock = std::function<Instant()>;

constexpr int kDeviceRounds = 3;
constexpr double kLeastOfTime = 0.1;  // the fraction of a time that is not page faults, at least

double seconds_between(Instant start, Instant end) { return std::chrono::duration<double>(end - start).count(); }

// Measures the time that this thread has lost to page faults. A trainer's heap returns large blocks to the kernel and
// gets new pages for the next block; this is two thirds of the time of elementwise operators on 74 MB. A worker keeps
// its blocks (worker/process_memory.h).
class FaultClock {
 public:
  FaultClock() : fault_s_(measure()) {}

  double seconds() const { return static_cast<double>(count()) * fault_s_; }

 private:
  static constexpr size_t kTouchedBytes = 8 << 20;

  static int64_t count() {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
  }

  // Returns the seconds per page of fresh memory; 0 if no memory is available.
  static double measure() {
    void* memory = ::mmap(nullptr, kTouchedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    const auto page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const int64_t faults_before = count();
    const Instant start = clock_now();
    for (size_t i = 0; i < kTouchedBytes; i += page_bytes) static_cast<volatile char*>(memory)[i] = 1;
    const double seconds = seconds_between(start, clock_now());
    const int64_t faults = count() - faults_before;
    ::munmap(memory, kTouchedBytes);
    return faults > 0 ? seconds / static_cast<double>(faults) : 0;
  }

  double fault_s_;
};

// Sets the number of threads for kernels that this thread calls.
class ThreadsGuard {
 public:
  explicit ThreadsGuard(int count) : count_before_(at::get_num_threads()) {
    if (count != count_before_) at::set_num_threads(count);
  }
  ~ThreadsGuard() {
    if (at::get_num_threads() != count_before_) at::set_num_threads(count_before_);
  }
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  int count_before_;
};

// Numbers tensors by the bytes they cover: a reshaped tensor has its base's number, a slice has another.
class StorageNumbers {
 public:
  graph::ValueSize size_of(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return {};
    const at::Tensor& tensor = value.toTensor();
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (bytes == 0) return {};
    int64_t reach = 1;  // elements from the first to the last
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) reach += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const auto key = std::tuple(begin, reach * static_cast<int64_t>(tensor.element_size()), bytes);
    const auto number = static_cast<uint32_t>(numbers_.size());
    return {bytes, numbers_.try_emplace(key, number).first->second};
  }

 private:
  std::map<std::tuple<uintptr_t, int64_t, int64_t>, uint32_t> numbers_;
};

// Returns the nodes that could move and the inputs they may read, as a separate graph with the same value ids. The
// nodes run on the CPU here, so none of them is marked as on a device.
graph::Graph movable_part(const graph::Graph& graph, std::span<const graph::Verdict> verdicts) {
  graph::Graph part = graph;
  part.nodes.clear();
  part.outputs.clear();
  part.traits.clear();
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    if (verdicts[i].movable) part.nodes.push_back(graph.nodes[i]);
  for (graph::Node& node : part.nodes) node.on.reset();
  std::erase_if(part.inputs, [](const graph::Input& input) {
    return input.kind == graph::InputKind::kState || (input.kind == graph::InputKind::kInt && !input.size_of);
  });
  return part;
}

// Runs the movable part of a graph node by node, and measures times and sizes.
class Calibrator {
 public:
  using Times = std::vector<std::vector<double>>;  // by node of the movable part, then by round

  Calibrator(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Clock& clock)
      : graph_(graph), part_(movable_part(graph, verdicts)), clock_(clock), last_uses_(last_uses(part_)) {}

  // Resolves the operators and fills the frame that every round starts from.
  Result<void> prepare(std::span<const at::Tensor> leaves, std::span<const std::optional<at::Tensor>> constants) {
    start_.resize(graph_.value_names.size());
    std::vector<at::Tensor> const_tensors;
    size_t constant_index = 0;
    for (const graph::Input& input : graph_.inputs) {
      if (input.kind != graph::InputKind::kConst && input.kind != graph::InputKind::kState) continue;
      if (constant_index >= constants.size()) break;  // the executor will report it
      at::Tensor tensor = constants[constant_index++].value_or(at::Tensor());
      if (input.kind == graph::InputKind::kState) continue;
      const_tensors.push_back(tensor);
      start_[input.value] = tensor;
    }
    // The executor performs all checks; a graph that it accepts is run here node by node.
    const auto executor =
        Executor::create(part_, std::move(const_tensors), {.allow_random = true, .allow_state = false});
    if (!executor) return executor.error();
    if (auto accepted = executor.value().accepts(leaves); !accepted) return accepted;
    for (const graph::Input& input : part_.inputs) {
      if (input.kind == graph::InputKind::kLeaf) start_[input.value] = leaves[input.leaf_index];
      if (input.size_of) start_[input.value] = start_[input.size_of->tensor].toTensor().size(input.size_of->dim);
    }
    for (const graph::Node& node : part_.nodes) {
      auto call = OperatorCall::prepare(node);
      if (!call) return call.error();
      calls_.push_back(std::move(call).value());
    }
    return {};
  }

  // Returns the values. Keeps all of them until the end, so that no two share an address by accident.
  Result<Frame> measure_sizes(graph::Calibration& calibration) {
    Frame frame = start_;
    c10::Stack stack;
    for (const OperatorCall& call : calls_)
      if (auto ran = call.run(frame, stack); !ran) return ran.error();
    StorageNumbers numbers;
    calibration.values.reserve(frame.size());
    for (const c10::IValue& value : frame) calibration.values.push_back(numbers.size_of(value));
    return frame;
  }

  // Frees values at their last use, as the executor does: memory that the allocator reuses is faster. `kept` receives
  // the times for a heap that keeps its pages, for operators that run on this thread only.
  Result<void> measure_round(Times& times, Times* kept) {
    times.resize(calls_.size());
    if (kept != nullptr) kept->resize(calls_.size());
    Frame frame = start_;
    c10::Stack stack;
    for (size_t i = 0; i < calls_.size(); ++i) {
      const double lost_before = faults_.seconds();
      const Instant start = clock_();
      if (auto ran = calls_[i].run(frame, stack); !ran) return ran;
      const double seconds = seconds_between(start, clock_());
      times[i].push_back(seconds);
      const double lost = faults_.seconds() - lost_before;
      if (kept != nullptr) (*kept)[i].push_back(std::max(seconds - lost, seconds * kLeastOfTime));
      for (const ValueId value : last_uses_[i]) frame[value] = c10::IValue();
    }
    return {};
  }

  std::vector<double> medians(std::span<const graph::Verdict> verdicts, Times times) const {
    std::vector<double> node_s(graph_.nodes.size(), 0.0);
    size_t place = 0;
    for (size_t node = 0; node < verdicts.size(); ++node) {
      if (!verdicts[node].movable) continue;
      std::vector<double>& seconds = times[place++];
      const auto middle = seconds.begin() + static_cast<ptrdiff_t>(seconds.size() / 2);
      std::nth_element(seconds.begin(), middle, seconds.end());
      node_s[node] = *middle;
    }
    return node_s;
  }

 private:
  const graph::Graph& graph_;
  const graph::Graph part_;
  const Clock& clock_;
  Frame start_;
  const FaultClock faults_;
  std::vector<OperatorCall> calls_;                    // by node of part_
  const std::vector<std::vector<ValueId>> last_uses_;  // by node of part_
};

}  // namespace

Result<graph::Calibration> calibrate(const graph::Graph& graph, std::span<const graph::Verdict> verdicts,
                                     std::span<const at::Tensor> leaves,
                                     std::span<const std::optional<at::Tensor>> constants,
                                     const CalibrateOptions& options) {
  if (verdicts.size() != graph.nodes.size())
    return Fault{Errc::kMismatch, "calibration was given " + std::to_string(verdicts.size()) + " verdicts for " +
                                      std::to_string(graph.nodes.size()) +
                                      " nodes; pass the verdicts of the same graph"};
  Calibrator calibrator(graph, verdicts, options.clock);
  if (auto prepared = calibrator.prepare(leaves, constants); !prepared) return prepared.error();
  const ExecutionGuard execution;
  const GeneratorGuard generator;
  const Instant start = options.clock();
  graph::Calibration calibration;
  const int trainer_threads = at::get_num_threads();
  const auto measure = [&](int threads, Calibrator::Times& times, Calibrator::Times* kept) {
    const ThreadsGuard guard(threads);
    return calibrator.measure_round(times, kept);
  };
  Calibrator::Times worker_times;
  Calibrator::Times on_one_thread;
  Calibrator::Times trainer_times;
  DeviceTimes on_devices;
  {
    const auto values = calibrator.measure_sizes(calibration);
    if (!values) return values.error();
    if (std::ranges::any_of(graph.nodes, [](const graph::Node& node) { return node.on.has_value(); }))
      on_devices = time_on_devices(graph, verdicts, values.value(), kDeviceRounds);
  }
  // Alternate, so that other load on the machine affects both alike.
  for (int round = 0; round < std::max(1, options.round_count); ++round) {
    if (round > 0 && seconds_between(start, options.clock()) > options.seconds_max) break;
    if (auto measured = measure(1, on_one_thread, &worker_times); !measured) return measured.error();
    if (trainer_threads == 1) continue;
    if (auto measured = measure(trainer_threads, trainer_times, nullptr); !measured) return measured.error();
  }
  calibration.node_s = calibrator.medians(verdicts, std::move(worker_times));
  calibration.trainer_node_s =
      calibrator.medians(verdicts, std::move(trainer_threads == 1 ? on_one_thread : trainer_times));
  for (size_t node = 0; node < on_devices.node_s.size(); ++node) {
    if (!graph.nodes[node].on || !verdicts[node].movable) continue;
    calibration.trainer_node_s[node] = on_devices.node_s[node];
  }
  calibration.copy_bytes_per_s = on_devices.copy_bytes_per_s;
  return calibration;
}

}  // namespace penstock::runtime
