// SPDX-License-Identifier: Apache-2.0
#pragma once
// The main thread of a native process that makes batches, for a pool job or as a trainer's own worker: takes work,
// opens jobs and answers.

#include <functional>
#include <string>

#include "base/result.h"
#include "worker/batch_server.h"

namespace penstock::api {

struct WorkerSpeech {
  std::function<void(const std::string&)> say;   // for information: jobs started and finished
  std::function<void(const std::string&)> tell;  // for messages that need attention
};

// Serves until the job is over, or the trainer is gone. A fault states why it cannot continue.
Result<void> serve_jobs(worker::BatchServer& server, const WorkerSpeech& speech);

}  // namespace penstock::api
