// SPDX-License-Identifier: Apache-2.0
#pragma once
// The command line of penstock-worker.

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"

namespace penstock::api {

// A value type.
struct WorkerOptions {
  enum class Mode : uint8_t {
    kSupervise,  // start servers and supervise them
    kWarm,       // be the process from which a server forks job processes
    kOwn,        // serve the trainer that started this process
    kHelp,
    kVersion,
  };
  Mode mode = Mode::kSupervise;
  std::string controller{};  // addresses as text; empty if not given
  std::string keys{};
  std::string bind{};
  std::string advertise{};
  std::string data_bind{};
  std::string data_advertise{};
  int processes = 1;
  double patience_s = 60;
  double grace_s = 30;     // server::kDrainGrace
  int warm_fd = -1;        // kWarm: its end of the server's channel
  pid_t parent_pid = 0;    // kOwn: end when this process ends
  std::string handover{};  // kOwn
  int report_fd = -1;      // kOwn: where to report the listening address
};

constexpr int kWorkerProcessesMax = 256;

std::string worker_usage();

// kMalformed, with a message that shows the usage.
Result<WorkerOptions> parse_worker_options(const std::vector<std::string>& arguments);

// The options of each worker that `options` request, each with separate addresses. Resolves host names, which can
// block.
Result<std::vector<WorkerOptions>> options_of_workers(const WorkerOptions& options);

// Arguments of penstock-server in addition to the workers' options.
struct ServerSettings {
  int exit_fd = -1;  // the supervisor's ExitPipe
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes = 0;
  std::vector<std::string> warm_command{};
};

// The arguments of a penstock-server with these workers, at least one, which differ only in their addresses. It ends
// with this process.
std::vector<std::string> server_arguments(const std::vector<WorkerOptions>& workers, const ServerSettings& settings);

}  // namespace penstock::api
