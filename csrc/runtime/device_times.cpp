// SPDX-License-Identifier: Apache-2.0
#include "runtime/device_times.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "capture/devices.h"
#include "runtime/last_uses.h"

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

double time_nothing(c10::Device device, int round_count) {
  try {
    return Timeline(device).seconds(round_count, [] {});
  } catch (const c10::Error&) {
    return 0;
  }
}

// Returns bytes per second; 0 if the device or its memory cannot be measured.
double measured_copy_rate(c10::Device device, int round_count, double nothing_s) {
  try {
    const at::Tensor source = at::empty({kCopiedBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    const at::Tensor target = at::empty({kCopiedBytes}, at::TensorOptions(at::kByte).device(device));
    const double seconds =
        Timeline(device).seconds(round_count, [&] { target.copy_(source, /*non_blocking=*/true); }) - nothing_s;
    return seconds > 0 ? static_cast<double>(kCopiedBytes) / seconds : 0;
  } catch (const c10::Error&) {
    return 0;
  }
}

// Measures once per process, if that succeeds: the rate is a property of the machine, and measuring it costs memory and
// copies.
double copy_rate(c10::Device device, int round_count, double nothing_s) {
  static Mutex mutex;
  static std::map<std::string, double> rates;
  const MutexLock lock(mutex);
  double& rate = rates[device.str()];
  if (rate == 0) rate = measured_copy_rate(device, round_count, nothing_s);
  return rate;
}

}  // namespace

DeviceTimes time_on_devices(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Frame& values,
                            int round_count) {
  DeviceTimes times{.node_s = std::vector<double>(graph.nodes.size(), 0.0), .copy_bytes_per_s = 0};
  DeviceFrame device_frame(values);
  const std::vector<std::vector<ValueId>> dead = last_uses(graph);
  std::map<std::string, double> nothing_s;  // by device: the time between two consecutive events
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const graph::Node& node = graph.nodes[i];
    if (!node.on || !verdicts[i].movable) continue;
    times.node_s[i] = estimate(node, values);
    const std::optional<c10::Device> device = capture::accelerator_of(node.on->device);
    if (!device || graph.traits[i].purity == graph::Purity::kRandom) continue;
    const auto [nothing, is_new] = nothing_s.try_emplace(device->str(), 0.0);
    if (is_new) {
      nothing->second = time_nothing(*device, round_count);
      times.copy_bytes_per_s = copy_rate(*device, round_count, nothing->second);
    }
    if (reads_host_alone(node)) continue;  // a copy to the device, made ahead of time
    if (const auto seconds = time_node(node, device_frame, *device, round_count))
      times.node_s[i] = std::max(0.0, *seconds - nothing->second);
    device_frame.free(dead[i]);
  }
  return times;
}

}  // namespace penstock::runtime
