// SPDX-License-Identifier: Apache-2.0
#pragma once
// PoolWorkers are worker processes, which create the dataset themselves: pool workers, workers that the trainer starts
// on this machine (OwnProcesses), or both.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "api/worker_set.h"
#include "base/child_process.h"
#include "base/result.h"
#include "dataset/job_text.h"
#include "net/endpoint.h"
#include "pool_client/pool_client.h"
#include "pool_client/pool_directory.h"

namespace penstock::api {

// Worker processes that a trainer starts itself: native ones for a plug-in, Python ones for a Python dataset. They
// serve like pool workers and are reached over loopback with the keys that this user's processes share. Confined to the
// trainer's thread. Destroying it ends the processes.
class OwnProcesses {
 public:
  enum class Kind : uint8_t { kNative, kPython };

  // Waits until all of them listen. If one does not: kFailed, kTimeout or kUnsupported, with a message for the user.
  static Result<OwnProcesses> start(Kind kind, int64_t count);

  OwnProcesses(OwnProcesses&&) noexcept = default;
  OwnProcesses& operator=(OwnProcesses&&) noexcept = default;
  ~OwnProcesses();

  const std::vector<pool_client::OwnWorker>& workers() const { return workers_; }

  struct Loss {
    uint64_t worker_id = 0;
    pid_t pid = 0;
    std::string how{};  // "was ended by SIGKILL ..."
  };
  // The processes that have died since the last call.
  std::vector<Loss> take_losses();
  bool are_all_lost() const { return !processes_.empty() && lost_.size() == processes_.size(); }

 private:
  OwnProcesses() = default;

  std::vector<ChildProcess> processes_;
  std::vector<pool_client::OwnWorker> workers_;
  std::set<size_t> lost_;
};

// A pool's workers together with the workers that the trainer starts. Thread-compatible: for the trainer's thread.
class PoolWorkers final : public WorkerSet {
 public:
  // Starts the trainer's local processes, and asks a worker to describe the dataset. Throws Error kWorker if none can.
  PoolWorkers(const AnyDataset& dataset, const Options& options, std::optional<std::string> pool);
  ~PoolWorkers() override;

  DatasetShape shape() const override { return shape_; }
  void start() override;
  const std::shared_ptr<loader::Client>& client() const override { return as_client_; }
  void set_starts(const wire::EpochSeeds& seeds, const ResumePoint& point) override;
  std::optional<c10::Device> device() const override;
  std::string place_of(const std::string& worker) const override { return " in penstock worker " + worker; }
  bool is_elsewhere() const override { return controller_.has_value(); }
  void check() override;

 private:
  using Client = std::shared_ptr<pool_client::PoolClient>;

  Client open_client(bool is_iterable, uint32_t shard_count);
  DatasetShape request_shape();
  void use_prefixes(std::vector<Message> messages) override;
  void use_shipment(std::optional<std::vector<std::byte>> shipment) override;
  void name_blobs(pool_client::PoolClient& client);
  void look_after(pool_client::PoolClient& client);
  [[noreturn]] void raise_lost() const;

  const Options& options_;
  std::optional<net::Endpoint> controller_;
  std::optional<std::string> key_folder_;
  std::optional<OwnProcesses> own_;
  dataset::JobText job_;
  std::string job_blob_;
  wire::BlobId job_id_{};
  std::string transform_blob_;
  DatasetShape shape_;
  pool_client::PoolIoOptions::ReportedSize reported_size_;  // and the worker that reported shape_
  Client client_;
  std::shared_ptr<loader::Client> as_client_;  // client_ as its base class
  std::vector<Message> prefixes_;
  std::optional<std::vector<std::byte>> shipment_;
  std::vector<OwnProcesses::Loss> losses_;
  std::optional<std::chrono::steady_clock::time_point> waiting_since_;
  bool is_wait_logged_ = false;
};

}  // namespace penstock::api
