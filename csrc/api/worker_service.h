// SPDX-License-Identifier: Apache-2.0
#pragma once
// The main thread of a native process that makes batches, of a job or of a trainer's own: takes work, opens jobs,
// answers.

#include <functional>
#include <string>

#include "base/result.h"
#include "worker/batch_server.h"

namespace penstock::api {

struct WorkerSpeech {
  std::function<void(const std::string&)> say;   // what happens: jobs begun and finished
  std::function<void(const std::string&)> tell;  // what needs attention
};

// Serves until the job is over, or the trainer is gone. The fault says why there is no use in going on.
Result<void> serve_jobs(worker::BatchServer& server, const WorkerSpeech& speech);

}  // namespace penstock::api
