// SPDX-License-Identifier: Apache-2.0
#pragma once
// The main thread of a native process that makes batches, for a pool job or as a trainer's local worker, and of the
// warm process from which a pool's job processes are forked. The counterparts for Python datasets are
// python/penstock/pool/warm_process.py and job_process.py.

#include <functional>
#include <string>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "worker/batch_server.h"

namespace penstock::api {

// The log of a process that serves jobs.
struct WorkerLog {
  std::function<void(const std::string&)> say;   // for information: jobs started and finished
  std::function<void(const std::string&)> tell;  // for messages that need attention
};

// Takes work, opens jobs and answers, until the job is over or the trainer is gone. A fault states why it cannot
// continue.
Result<void> serve_jobs(worker::BatchServer& server, const WorkerLog& speech);

// A description for people: this worker's versions, and its process `pid`.
std::string about_worker(int pid);

// Runs the warm process of a pool's native workers: forks a job process whenever the server at the other end of the
// channel requests one. The warm process has loaded libtorch, runs no user code and holds no key of the pool. Returns
// the exit code once the server is gone, and all of these processes with it. Runs in the only thread of its process.
// Jobs cannot open files in `key_folder` if the machine has a way to hide it; if not, the log reports this. Empty:
// there is no such folder.
int run_warm_worker(FileDescriptor channel, const std::string& key_folder);

}  // namespace penstock::api
