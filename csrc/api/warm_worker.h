// SPDX-License-Identifier: Apache-2.0
#pragma once
// The warm process of a pool's native workers, from which the processes of jobs are forked: it has loaded libtorch,
// runs nobody's code, and has no key of the pool. It is to plug-ins what python/penstock/pool/warm_process.py and
// job_process.py are to Python's datasets.

#include <string>

#include "base/file_descriptor.h"

namespace penstock::api {

// For people: this worker's versions, and its process `pid`.
std::string about_worker(int pid);

// Forks a process whenever the server at the other end of the channel asks for one. Returns the exit code once the
// server is gone, and all of these processes with it. It is the only thread of its process. Jobs cannot open what is in
// `key_folder`, where the machine has a way to hide it; where it has none, the log says so. Empty: there is none.
int run_warm_worker(FileDescriptor channel, const std::string& key_folder);

}  // namespace penstock::api
