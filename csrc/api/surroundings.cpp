// SPDX-License-Identifier: Apache-2.0
#include "api/surroundings.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "base/process.h"
#include "penstock/error.h"

namespace penstock::api {

std::optional<std::string> odd_surroundings() {
  for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(device))
      return "autocast must be off for a TorchScript module to be captured";
  if (const auto dtype = c10::get_default_dtype_as_scalartype(); dtype != at::kFloat)
    return std::string("the default dtype is ") + c10::toString(dtype) + ", not Float";
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    return "forward runs under a functorch transform";
  return std::nullopt;
}

std::string program_next_to_library(const std::string& name) {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&program_next_to_library), &info) != 0 && info.dli_fname != nullptr) {
    std::error_code error;
    const auto library = std::filesystem::canonical(info.dli_fname, error);
    const auto program = library.parent_path() / name;
    if (!error && std::filesystem::exists(program, error)) return program.string();
  }
  return name;
}

namespace {

std::string text(TorchVersion version) { return std::to_string(version.major) + "." + std::to_string(version.minor); }

}  // namespace

TorchVersion loaded_torch(TorchVersion otherwise) {
  using AbiVersion = uint64_t (*)();
  const auto ask = reinterpret_cast<AbiVersion>(::dlsym(RTLD_DEFAULT, "aoti_torch_abi_version"));
  if (ask == nullptr) return otherwise;
  const uint64_t version = ask();  // in the format of TORCH_ABI_VERSION in torch/headeronly/version.h
  return {.major = static_cast<int32_t>(version >> 56), .minor = static_cast<int32_t>(version >> 48 & 255)};
}

void check_torch(TorchVersion compiled_with, const std::string& who) {
  const TorchVersion own;
  if (compiled_with != own) {
    throw Error(ErrorKind::kUnsupported,
                who + " was compiled with the headers of torch " + text(compiled_with) +
                    ", but libpenstock was built for torch " + text(own) +
                    "; recompile it with find_package(Penstock), which finds the matching torch");
  }
  const TorchVersion loaded = loaded_torch(own);
  if (loaded != own) {
    throw Error(ErrorKind::kUnsupported, "libpenstock was built for torch " + text(own) + ", but torch " +
                                             text(loaded) +
                                             " is loaded in this process; check its path with ldd (LD_LIBRARY_PATH), "
                                             "or rebuild penstock with that torch");
  }
}

namespace {

constexpr uint64_t kDefaultArenaBytes = 256ULL << 20;
constexpr uint64_t kDefaultJobBytes = 64ULL << 30;

Result<uint64_t> bytes_of(const char* variable, uint64_t otherwise) {
  const auto given = environment(variable);
  if (!given) return otherwise;
  const std::string& text = *given;
  uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || end != text.data() + text.size() || bytes == 0) {
    return Fault{Errc::kMalformed, std::string(variable) + " is '" + text +
                                       "', but must be a positive number of bytes, such as " +
                                       std::to_string(otherwise)};
  }
  return bytes;
}

}  // namespace

Result<uint64_t> arena_bytes() { return bytes_of("PENSTOCK_ARENA_BYTES", kDefaultArenaBytes); }
Result<uint64_t> job_bytes() { return bytes_of("PENSTOCK_JOB_BYTES", kDefaultJobBytes); }

namespace {

double affine_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// The quota in CPUs, at most `limit`; `limit` if the file is missing or has no limit ("max").
double quota_of(const std::string& folder, double limit) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0;
  double period = 0;
  return file >> quota >> period && quota > 0 && period > 0 ? std::min(limit, quota / period) : limit;
}

// The lowest quota of the process's cgroup and its ancestors. In a container the group may be named by its path on the
// host, of which only the mount point exists.
double within_quotas(double limit) {
  const std::string mount = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3); group.starts_with('/'); group.resize(group.rfind('/')))
      limit = quota_of(mount + group, limit);
  }
  return quota_of(mount, limit);
}

double local_ranks() {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  return text == nullptr ? 1 : std::max(1, std::atoi(text));
}

}  // namespace

uint32_t usable_cpus() { return static_cast<uint32_t>(std::max(1.0, within_quotas(affine_cpus()) / local_ranks())); }

}  // namespace penstock::api
