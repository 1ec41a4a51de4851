// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options of a pool's I/O thread, which all its parts read: pool_io.h.

#include <cstdint>
#include <optional>
#include <string>

#include "base/numerics.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/seal.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

struct PoolIoOptions {
  std::optional<net::Endpoint> controller;  // nullopt: there are only own workers
  net::KeyRing keys;
  std::string job;    // the job's name, for people
  std::string about;  // describes this process, for people
  uint32_t worker_count_max = 0;
  uint32_t depth = 2;         // maximum outstanding requests per worker
  uint64_t credit_bytes = 0;  // of each worker
  uint64_t arena_bytes = 0;   // size of the memory for received batches
  bool is_iterable = false;   // every shard is a lane
  bool allow_pickle = false;  // unpickling runs code, so this trusts workers with this process
  bool is_python = false;     // batches are converted to Python values
  net::Resolver::Lookup lookup = net::look_up;
  uint8_t ciphers = net::fast_ciphers();  // for the chunks of batches
  // Of the GPU that the program trains on, as NVIDIA's tools show it; empty without one.
  std::string gpu_uuid = {};
  wire::JobKind job_kind = wire::JobKind::kPython;
  uint16_t torch = 0;  // the version that the job is made with, as wire::torch_number()
  // For a trainer without a dataset: the dataset's size as reported by one worker; all others must report the same.
  struct ReportedSize {
    uint64_t size = wire::kSizeUnknown;
    std::string by{};  // the worker
  };
  ReportedSize reported_size = {};
  wire::JobRank job_rank = {};
  Numerics numerics = {};  // of this process's kernels; zeros: workers are not compared with it
};

}  // namespace penstock::pool_client
