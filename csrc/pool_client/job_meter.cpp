// SPDX-License-Identifier: Apache-2.0
#include "pool_client/job_meter.h"

#include <dlfcn.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "base/process.h"

namespace penstock::pool_client {
namespace {

constexpr int kNvmlSuccess = 0;
constexpr uint64_t kUjPerMj = 1000;

Fault unknown(const std::string& why) {
  return {Errc::kUnsupported, "the energy consumption of the GPU is unknown: " + why};
}

}  // namespace

Result<std::unique_ptr<GpuEnergy>> GpuEnergy::open(const std::string& uuid, const std::string& library) {
  std::unique_ptr<GpuEnergy> energy(new GpuEnergy);
  energy->library_ = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (energy->library_ == nullptr) return unknown(::dlerror());
  const auto find = [&](const char* name) { return ::dlsym(energy->library_, name); };
  const auto start = reinterpret_cast<int (*)()>(find("nvmlInit_v2"));
  const auto shut_down = reinterpret_cast<ShutDown>(find("nvmlShutdown"));
  const auto device_of = reinterpret_cast<int (*)(const char*, void**)>(find("nvmlDeviceGetHandleByUUID"));
  energy->energy_of_ = reinterpret_cast<EnergyOf>(find("nvmlDeviceGetTotalEnergyConsumption"));
  if (start == nullptr || shut_down == nullptr || device_of == nullptr || energy->energy_of_ == nullptr)
    return unknown(library + " is too old to report it");
  if (const int code = start(); code != kNvmlSuccess) return unknown("nvmlInit_v2 failed with " + std::to_string(code));
  energy->shut_down_ = shut_down;
  if (const int code = device_of(uuid.c_str(), &energy->device_); code != kNvmlSuccess)
    return unknown("there is no GPU " + uuid + " (NVML's error " + std::to_string(code) + ")");
  if (const auto first = energy->read(); !first) return first.error();
  return energy;
}

GpuEnergy::~GpuEnergy() {
  if (shut_down_ != nullptr) static_cast<void>(shut_down_());
  if (library_ != nullptr) static_cast<void>(::dlclose(library_));
}

Result<uint64_t> GpuEnergy::read() const {
  unsigned long long millijoules = 0;
  if (const int code = energy_of_(device_, &millijoules); code != kNvmlSuccess)
    return unknown("nvmlDeviceGetTotalEnergyConsumption failed with " + std::to_string(code));
  return uint64_t{millijoules} * kUjPerMj;
}

GpuEnergyMeter::GpuEnergyMeter(const std::string& uuid, const std::string& library) {
  try {
    std::thread([state = state_, uuid, library] {
      try {
        run(*state, uuid, library);
      } catch (...) {
        state->meter.set({});
      }
    }).detach();
  } catch (const std::exception&) {
    // No thread could be started: the energy stays unknown, as without a GPU.
  }
}

GpuEnergyMeter::~GpuEnergyMeter() { state_->asked.close(); }

wire::GpuMeter GpuEnergyMeter::take() {
  bool next = true;
  static_cast<void>(state_->asked.try_push(next));  // if it is full, the previous request is still pending
  return state_->meter.get();
}

void GpuEnergyMeter::run(State& state, const std::string& uuid, const std::string& library) {
  begin_own_thread("pk_energy");
  const auto gpu = GpuEnergy::open(uuid, library);
  wire::GpuMeter meter;
  bool is_first = true;
  while (gpu) {
    const auto now_uj = gpu.value()->read();
    meter.now_uj = now_uj ? now_uj.value() : wire::kUnknownEnergy;
    if (std::exchange(is_first, false)) meter.begin_uj = meter.now_uj;
    state.meter.set(meter);
    if (!now_uj || !state.asked.pop_until(std::chrono::steady_clock::time_point::max())) return;
  }
}

void JobMeter::note_message(uint64_t worker_id, const wire::PoolAnswer& answer, Instant now) {
  if (answer.message.kind == wire::ToTrainer::Kind::kWelcome) {
    workers_.welcomed(worker_id, answer.meter, /*is_continued=*/!answer.message.is_fresh, now);
  } else {
    workers_.heard(worker_id, answer.meter, now);
  }
  board_.set(workers_.totals());
}

void JobMeter::note_batch(const wire::PoolAnswer& answer) {
  workers_.came({.sample_count = answer.sample_count, .bytes = answer.payload_bytes});
  board_.set(workers_.totals());
}

void JobMeter::note_parting(uint64_t worker_id, Instant now) {
  workers_.parted(worker_id, now);
  board_.set(workers_.totals());
}

}  // namespace penstock::pool_client
