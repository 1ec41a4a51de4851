// SPDX-License-Identifier: Apache-2.0
#pragma once
// Takes from the process of a job what its code is not to reach: folders, a network, an account, resources. The process
// does it to itself, before it runs any code of the job, and cannot undo it; what it starts has it, too.
//
// Folders of keys are hidden in one of two ways. With a mount namespace an empty folder lies over each: nothing else
// changes for the job. That needs root's rights, or a user namespace. With Landlock's rules alone a job is granted, of
// the folders that lead to a hidden one, all that is in them but that: Landlock knows no exceptions. So what is made in
// these folders later is not readable for a job that runs, and it can make nothing there itself.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock {

struct JobSeparation {
  enum class Hiding : uint8_t { kNone, kMounts, kRules };
  // kNamespace: a network namespace, with no device that is up but loopback if it `has_loopback`. kFilter: no socket
  // but Unix ones.
  enum class NoNetwork : uint8_t { kNone, kNamespace, kFilter };

  Hiding hiding = Hiding::kNone;
  std::vector<std::string> hidden{};  // folders; one that is not there is left out

  std::string private_tmp{};        // a folder to have in the place of /tmp and /var/tmp; none: those of the machine
  std::vector<std::string> kept{};  // folders that stay where they are, below a private /tmp, too

  bool are_writes_bounded = false;
  std::vector<std::string> writable{};  // then, besides what every program needs, such as /dev/null and /dev/shm

  NoNetwork no_network = NoNetwork::kNone;
  bool has_loopback = false;  // in its network namespace, where only the processes of the job meet

  std::optional<uint32_t> uid{};  // and the group of that number

  std::optional<uint64_t> data_bytes{};        // RLIMIT_DATA
  std::optional<uint64_t> descriptor_count{};  // RLIMIT_NOFILE
  std::optional<uint64_t> process_count{};     // RLIMIT_NPROC

  bool has_any() const {
    return hiding != Hiding::kNone || !private_tmp.empty() || are_writes_bounded || no_network != NoNetwork::kNone ||
           uid.has_value();
  }
};

// Separates the calling process, which has one thread. With any of the levels it also loses the capabilities that it
// has no use for, gains none by what it starts (no_new_privs), and where there is Landlock it can neither signal nor
// trace processes that are not its own. Core dumps are off in any case. kUnsupported where the system refuses; the
// process is then to end, since part of it may be done.
Result<void> separate_job(const JobSeparation& separation);

// Whether that can be had here: tries it in a process that ends at once, which must be able to enter the folders
// `needed` then. Blocks.
Result<void> try_separation(const JobSeparation& separation, const std::vector<std::string>& needed = {});

// The version of Landlock that the kernel has; 0 without.
int landlock_version();

struct KeyHidingOptions {
  std::string folder{};               // of keys, without symbolic links
  std::vector<std::string> needed{};  // files and folders from which jobs load code
  bool is_demanded = false;           // by the operator, at any cost to jobs
  std::string way_to_demand{};        // for the advice; empty: there is none
};

struct KeyHiding {
  JobSeparation::Hiding hiding = JobSeparation::Hiding::kNone;
  std::string notice{};   // for the log: what it costs jobs
  std::string trouble{};  // why keys are not hidden
};

// Chooses how keys are hidden from jobs: with a mount namespace, else with Landlock, but the latter only on demand
// where all accounts may make files beside the folder, which a job would lose. `refusal` returns why one of the two
// cannot be had, or an empty text.
KeyHiding choose_key_hiding(const KeyHidingOptions& options,
                            const std::function<std::string(JobSeparation::Hiding)>& refusal);

}  // namespace penstock
