// SPDX-License-Identifier: Apache-2.0
#pragma once
// Removes from a job's process everything that the job's code must not reach: folders, a network, an account,
// resources. The process does this to itself before it runs any code of the job, and cannot undo it; its child
// processes inherit it.
//
// Key folders are hidden in one of two ways. With a mount namespace, an empty folder is mounted over each; nothing else
// changes for the job. That requires root, or a user namespace. With Landlock's rules alone, a job is granted access to
// everything in the ancestor folders of a hidden folder except that folder, since Landlock has no exceptions. Entries
// that are created in these ancestor folders later are therefore not readable for a running job, and the job cannot
// create any there.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock {

struct JobSeparation {
  enum class Hiding : uint8_t { kNone, kMounts, kRules };
  // kNamespace: a network namespace in which no device is up except loopback, if `has_loopback`. kFilter: only Unix
  // sockets are allowed.
  enum class NoNetwork : uint8_t { kNone, kNamespace, kFilter };

  Hiding hiding = Hiding::kNone;
  std::vector<std::string> hidden{};  // folders; missing ones are skipped

  std::string private_tmp{};        // a folder to use as /tmp and /var/tmp; empty: the machine's
  std::vector<std::string> kept{};  // folders that stay where they are, also below a private /tmp

  bool are_writes_bounded = false;
  std::vector<std::string> writable{};  // then, in addition to what every program needs, such as /dev/null and /dev/shm

  NoNetwork no_network = NoNetwork::kNone;
  bool has_loopback = false;  // in its network namespace, which only the processes of the job share

  std::optional<uint32_t> uid{};  // and the group with that number

  std::optional<uint64_t> data_bytes{};        // RLIMIT_DATA
  std::optional<uint64_t> descriptor_count{};  // RLIMIT_NOFILE
  std::optional<uint64_t> process_count{};     // RLIMIT_NPROC

  bool has_any() const {
    return hiding != Hiding::kNone || !private_tmp.empty() || are_writes_bounded || no_network != NoNetwork::kNone ||
           uid.has_value();
  }
};

// Separates the calling process, which must have one thread. With any of the levels it also loses the capabilities that
// it does not need, gains none by executing programs (no_new_privs), and with Landlock it can neither signal nor trace
// processes outside the job. Core dumps are always disabled. kUnsupported if the system refuses; the process must then
// end, since it may be partly separated.
Result<void> separate_job(const JobSeparation& separation);

// Checks whether the separation is possible here: tries it in a child process that exits immediately, and that must be
// able to enter the folders `needed` afterwards. Blocks.
Result<void> try_separation(const JobSeparation& separation, const std::vector<std::string>& needed = {});

// The version of Landlock that the kernel has; 0 if it has none.
int landlock_version();

struct KeyHidingOptions {
  std::string folder{};               // the key folder, without symbolic links
  std::vector<std::string> needed{};  // files and folders from which jobs load code
  bool is_demanded = false;           // by the operator, regardless of the cost to jobs
  std::string way_to_demand{};        // for the advice; empty if there is none
};

struct KeyHiding {
  JobSeparation::Hiding hiding = JobSeparation::Hiding::kNone;
  std::string notice{};   // for the log: its cost to jobs
  std::string trouble{};  // why keys are not hidden
};

// Chooses how keys are hidden from jobs: with a mount namespace, else with Landlock. If all accounts may create files
// in the folder's parent, which a job could not read, Landlock is used only on demand. `refusal` returns why one of the
// two is not available, or an empty text.
KeyHiding choose_key_hiding(const KeyHidingOptions& options,
                            const std::function<std::string(JobSeparation::Hiding)>& refusal);

}  // namespace penstock
