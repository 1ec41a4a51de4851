// SPDX-License-Identifier: Apache-2.0
#pragma once
// The warm process of a pool's native workers, from which job processes are forked: it has loaded libtorch, runs no
// user code and holds no key of the pool. The counterparts for Python datasets are python/penstock/pool/warm_process.py
// and job_process.py.

#include <string>

#include "base/file_descriptor.h"

namespace penstock::api {

// A description for people: this worker's versions, and its process `pid`.
std::string about_worker(int pid);

// Forks a process whenever the server at the other end of the channel requests one. Returns the exit code once the
// server is gone, and all of these processes with it. Runs in the only thread of its process. Jobs cannot open files in
// `key_folder` if the machine has a way to hide it; if not, the log reports this. Empty: there is no such folder.
int run_warm_worker(FileDescriptor channel, const std::string& key_folder);

}  // namespace penstock::api
