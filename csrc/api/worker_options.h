// SPDX-License-Identifier: Apache-2.0
#pragma once
// The command line of penstock-worker.

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"

namespace penstock::api {

// A value type.
struct WorkerOptions {
  enum class Mode : uint8_t {
    kSupervise,  // start processes and look after them
    kServe,      // be one of them
    kOwn,        // serve the trainer that started this process
    kHelp,
    kVersion,
  };
  Mode mode = Mode::kSupervise;
  std::string controller{};  // addresses as text; empty where none was given
  std::string keys{};
  std::string bind{};
  std::string advertise{};
  std::string data_bind{};
  std::string data_advertise{};
  int processes = 1;
  double patience_s = 60;
  double grace_s = 30;     // server::kDrainGrace
  pid_t parent_pid = 0;    // with which it ends
  int exit_fd = -1;        // of kServe: the supervisor's ExitPipe
  std::string handover{};  // of kOwn
  int report_fd = -1;      // of kOwn: where it says that it listens
};

constexpr int kWorkerProcessesMax = 256;

std::string worker_usage();

// kMalformed with a text that says how the command is called.
Result<WorkerOptions> parse_worker_options(const std::vector<std::string>& arguments);

// The options of each process that `options` ask for: addresses of their own. Looks hosts up, which can block.
Result<std::vector<WorkerOptions>> options_of_processes(const WorkerOptions& options);

// As arguments that parse_worker_options() reads.
std::vector<std::string> to_arguments(const WorkerOptions& options);

}  // namespace penstock::api
