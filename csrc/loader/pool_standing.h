// SPDX-License-Identifier: Apache-2.0
#pragma once
// How things stand between a trainer and a pool, in words: for the user who waits.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/instant.h"
#include "base/mutex.h"
#include "base/numerics.h"
#include "wire/reports.h"

namespace penstock::loader {

// From when on a controller or a worker that says nothing is spoken of.
inline constexpr Duration kSilenceTold = std::chrono::seconds(5);
inline constexpr size_t kRefusalCountMax = 64;       // workers whose reasons are kept
inline constexpr size_t kRefusalSpokenCountMax = 8;  // and said in one sentence

// Thread-safe.
class PoolStanding {
 public:
  struct Controller {
    bool has_answered = false;
    std::string trouble{};         // why it could not be talked to
    std::string lookup_failure{};  // why nobody knows its host
    Duration silence{};
  };

  explicit PoolStanding(wire::JobKind job_kind) : job_kind_(job_kind) {}

  void note(Controller controller, size_t known_count, size_t open_count);
  // Which batch the last workers have died of, in words, while there is no worker; else empty.
  void note_deaths(std::string deaths);
  // How many workers the pool has, and how many of them cannot run this trainer's job.
  void note_pool(size_t pool_count, size_t declined_count);
  // Why the worker does not work for this trainer. False if that is known already.
  bool note_refusal(uint64_t worker_id, const std::string& reason);
  // Notes a reason that the controller passes on, unless the worker itself has given one. False if one is known
  // already.
  bool note_reported_refusal(uint64_t worker_id, const std::string& reason);
  void forget_refusal(uint64_t worker_id);
  // Notes in which families of kernels a worker computes otherwise than this process. True for the first that does so
  // in any.
  bool note_numerics(uint64_t worker_id, const std::string& place, FamilySet differing);

  // For how long the controller has said nothing; none if it never has said anything.
  std::optional<Duration> controller_silence() const;

  // The workers that compute otherwise, by their places, and the families of kernels for people.
  std::map<std::string, std::string> workers_apart() const;

  // In a sentence or two. `where` is the controller's address, empty without one.
  std::string describe(const std::string& where) const;
  // The same, once every worker has declined the job.
  std::string describe_declined(const std::string& where) const;

 private:
  std::string spoken_lack(const std::string& where) const PENSTOCK_REQUIRES(mutex_);  // of workers
  std::string spoken_refusals() const PENSTOCK_REQUIRES(mutex_);
  void make_room_for(uint64_t worker_id) PENSTOCK_REQUIRES(mutex_);  // among the refusals

  const wire::JobKind job_kind_;  // it decides which program is to be started as a worker
  mutable Mutex mutex_;
  Controller controller_ PENSTOCK_GUARDED_BY(mutex_);
  size_t known_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t pool_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t declined_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t open_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  std::string deaths_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> refusals_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, std::pair<std::string, FamilySet>> apart_ PENSTOCK_GUARDED_BY(mutex_);
  bool is_apart_told_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

}  // namespace penstock::loader
