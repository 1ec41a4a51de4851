// SPDX-License-Identifier: Apache-2.0
#pragma once
// Worker processes, which create the dataset themselves: pool workers, workers on this machine, or both.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/own_processes.h"
#include "api/worker_set.h"
#include "dataset/job_text.h"
#include "net/endpoint.h"
#include "pool_client/pool_client.h"

namespace penstock::api {

// Thread-compatible: for the trainer's thread.
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
  DatasetShape ask_for_shape();
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
  pool_client::PoolIoOptions::SaidSize said_size_;  // and the worker that reported shape_
  Client client_;
  std::shared_ptr<loader::Client> as_client_;  // client_ as its base class
  std::vector<Message> prefixes_;
  std::optional<std::vector<std::byte>> shipment_;
  std::vector<OwnProcesses::Loss> losses_;
  std::optional<std::chrono::steady_clock::time_point> waiting_since_;
  bool is_waiting_told_ = false;
};

}  // namespace penstock::api
