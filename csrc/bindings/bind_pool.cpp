// SPDX-License-Identifier: Apache-2.0
// A trainer's side of a pool in Python: its client, the leaves that stay with the workers, and the relay between the
// ranks of a replica group.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/result.h"
#include "bindings/python_requests.h"
#include "bindings/raise.h"
#include "device/accelerator_device.h"
#include "net/key_folder.h"
#include "net/keys.h"
#include "pool_client/leaf_withholding.h"
#include "pool_client/pool_client.h"
#include "pool_client/pool_directory.h"
#include "replica/relay.h"
#include "runtime/numeric_fingerprint.h"
#include "wire/blob_record.h"
#include "wire/control_record.h"

namespace py = pybind11;

namespace penstock::bindings {

using loader::ClientOptions;
using net::Role;
using pool_client::LeafWithholding;
using pool_client::PoolClient;
using pool_client::PoolSource;
using wire::BlobId;

namespace {

// The keys of one rank for the other ranks of its replica group, for this run only. Thread-compatible.
class ReplicaKeys {
 public:
  ReplicaKeys() : pair_(net::KeyPair::generate()) {}

  std::string public_key() const { return pair_.public_key().text(); }
  Result<net::KeyPair> copy() const { return net::KeyPair::parse_secret(pair_.secret_text().text()); }

  // The key ring of a follower: `leader` is the worker that it knows.
  Result<net::KeyRing> ring_towards(const net::PublicKey& leader) const {
    auto own = copy();
    if (!own) return own.error();
    net::PublicKeys keys{.roles = {net::KeyPair::generate().public_key(), pair_.public_key(), leader,
                                   net::KeyPair::generate().public_key()}};
    return net::KeyRing(net::Role::kTrainer, std::move(own).value(), std::move(keys), net::KeyOrigin::kGiven);
  }

 private:
  net::KeyPair pair_;
};

struct PoolSettings {
  std::string controller;
  std::optional<std::string> key_folder;
  std::string job;
  std::string about;
  uint32_t worker_count_max;
  uint64_t arena_bytes;
  bool is_iterable;
  bool trust_workers;
  std::vector<std::tuple<uint64_t, std::string, std::string>> own_workers;
  std::string gpu_uuid;
  wire::JobRank job_rank;
  // The keys of a follower and its leader's key, instead of the pool's keys.
  std::optional<std::pair<std::shared_ptr<ReplicaKeys>, std::string>> replica_keys;
};

Result<net::KeyRing> keys_of(const PoolSettings& settings) {
  if (!settings.replica_keys) {
    return settings.controller.empty() ? net::load_shared_keys(Role::kTrainer)
                                       : net::load_keys(settings.key_folder, Role::kTrainer);
  }
  const auto leader = net::PublicKey::parse(settings.replica_keys->second);
  if (!leader) return leader.error();
  return settings.replica_keys->first->ring_towards(leader.value());
}

Result<std::unique_ptr<PoolSource>> make_source(const PoolSettings& settings, const ClientOptions& options) {
  std::optional<net::Endpoint> controller;
  if (!settings.controller.empty()) {
    auto endpoint = net::Endpoint::parse(settings.controller);
    if (!endpoint) return endpoint.error();
    controller = std::move(endpoint).value();
  }
  auto keys = keys_of(settings);
  if (!keys) return keys.error();
  std::optional<net::KeyRing> own_keys;
  std::vector<pool_client::OwnWorker> own_workers;
  for (const auto& [worker_id, text, handover] : settings.own_workers) {
    auto own_endpoint = net::Endpoint::parse(text);
    if (!own_endpoint) return own_endpoint.error();
    own_workers.push_back({.worker_id = worker_id, .endpoint = std::move(own_endpoint).value(), .handover = handover});
  }
  if (settings.replica_keys) {
    auto own = keys_of(settings);
    if (!own) return own.error();
    own_keys.emplace(std::move(own).value());
  } else if (!own_workers.empty()) {
    auto shared = net::load_shared_keys(Role::kTrainer);
    if (!shared) return shared.error();
    own_keys.emplace(std::move(shared).value());
  }
  const net::RunId run = net::draw_run_id(keys.value().own().public_key());
  // A variable, because g++ 12 warns that a string of a temporary may be uninitialized.
  pool_client::PoolIoOptions io{.controller = std::move(controller),
                                .keys = std::move(keys).value(),
                                .job = settings.job,
                                .about = settings.about,
                                .worker_count_max = settings.worker_count_max,
                                .depth = options.prefetch_factor,
                                .credit_bytes = settings.arena_bytes,
                                .arena_bytes = settings.arena_bytes,
                                .is_iterable = settings.is_iterable,
                                .allow_pickle = settings.trust_workers,
                                .is_python = true,
                                .gpu_uuid = settings.gpu_uuid,
                                .torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR),
                                .job_rank = settings.job_rank};
  io.numerics = runtime::numeric_fingerprint();
  return std::make_unique<PoolSource>(std::move(io), run, std::move(own_keys), std::move(own_workers));
}

std::shared_ptr<PoolClient> make_client(const PoolSettings& settings, const ClientOptions& options) {
  auto source = unwrap(without_gil([&] { return make_source(settings, options); }));
  PoolSource& pool = *source;
  return std::make_shared<PoolClient>(options, pool, std::move(source));
}

// A cut that ran: the leaves that the trainer reads, the keys of boundary tensors, and whether it is settled.
using UsedCut = std::tuple<std::set<uint32_t>, std::set<std::string>, bool>;
// The sizes of the leaves in bytes, the leaves that the program has read, and whether reads are detected.
using SeenBatch = std::tuple<std::vector<uint64_t>, std::set<uint32_t>, bool>;

std::optional<LeafWithholding::Order> note_call(LeafWithholding& withholding, uint64_t model,
                                                std::optional<SeenBatch> batch, std::vector<UsedCut> cuts) {
  std::optional<LeafWithholding::SeenBatch> seen;
  if (batch) {
    auto& [leaf_bytes, read_leaves, is_watched] = *batch;
    seen = {.leaf_bytes = std::move(leaf_bytes), .read_leaves = std::move(read_leaves), .is_watched = is_watched};
  }
  std::vector<LeafWithholding::UsedCut> used;
  for (auto& [raw_leaves, keys, is_settled] : cuts)
    used.push_back({.raw_leaves = std::move(raw_leaves), .keys = std::move(keys), .is_settled = is_settled});
  return withholding.note_call(model, seen, std::move(used));
}

void bind_withholding(py::module_& module) {
  py::class_<LeafWithholding::Order>(module, "ShipmentOrder")
      .def_property_readonly("message", [](const LeafWithholding::Order& self) -> std::optional<py::bytes> {
        if (!self.shipment) return std::nullopt;
        const auto bytes = wire::write_shipment(*self.shipment);
        return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
  py::class_<LeafWithholding>(module, "LeafWithholding")
      .def(py::init())
      .def("take", &LeafWithholding::take, py::arg("model"), py::arg("verify_every"))
      .def("forget", &LeafWithholding::forget, py::arg("model"))
      .def("note_call", &note_call, py::arg("model"), py::arg("batch"), py::arg("cuts"))
      .def("send_whole", &LeafWithholding::send_whole)
      .def("note_recall", &LeafWithholding::note_recall, py::arg("leaf"))
      .def_property_readonly("watched_leaves", &LeafWithholding::watched_leaves)
      .def_property_readonly("is_withholding", &LeafWithholding::is_withholding);
}

}  // namespace

void bind_pool(py::module_& module) {
  bind_withholding(module);
  module.def("identity_of_launched_job", &pool_client::identity_of_launched_job);
  py::class_<PoolClient, loader::Client, std::shared_ptr<PoolClient>>(module, "PoolClient")
      .def(py::init([](const std::string& controller, const std::optional<std::string>& key_folder,
                       const std::string& job, const std::string& about, uint32_t worker_count_max,
                       uint64_t arena_bytes, bool is_iterable, bool trust_workers,
                       const std::vector<std::tuple<uint64_t, std::string, std::string>>& own_workers,
                       uint32_t prefetch_factor, uint64_t prefetch_bytes, uint32_t shard_count, uint32_t overtaking_max,
                       bool keep_indices, bool pin_memory, const std::optional<std::string>& device,
                       const std::shared_ptr<loader::AheadWishes>& ahead, const std::string& gpu_uuid,
                       const std::string& job_identity, std::pair<uint32_t, uint32_t> rank,
                       const std::shared_ptr<replica::Relay>& relay, bool leaves_by_rank,
                       std::optional<std::pair<std::shared_ptr<ReplicaKeys>, std::string>> own_keys) {
             return make_client({.controller = controller,
                                 .key_folder = key_folder,
                                 .job = job,
                                 .about = about,
                                 .worker_count_max = worker_count_max,
                                 .arena_bytes = arena_bytes,
                                 .is_iterable = is_iterable,
                                 .trust_workers = trust_workers,
                                 .own_workers = own_workers,
                                 .gpu_uuid = gpu_uuid,
                                 .job_rank = pool_client::job_rank(job_identity, job, rank.first, rank.second),
                                 .replica_keys = std::move(own_keys)},
                                {.worker_count = 1,
                                 .prefetch_factor = prefetch_factor,
                                 .shard_count = shard_count,
                                 .prefetch_bytes = prefetch_bytes,
                                 .overtaking_max = overtaking_max,
                                 .keep_workers = true,
                                 .keep_indices = keep_indices,
                                 .pin_memory = pin_memory,
                                 .device = device::device_named(device),
                                 .ahead = ahead,
                                 .tap = relay,
                                 .leaves_by_rank = leaves_by_rank});
           }),
           py::kw_only(), py::arg("controller"), py::arg("key_folder"), py::arg("job"), py::arg("about"),
           py::arg("worker_count_max"), py::arg("arena_bytes"), py::arg("is_iterable"), py::arg("trust_workers"),
           py::arg("own_workers"), py::arg("prefetch_factor"), py::arg("prefetch_bytes"), py::arg("shard_count"),
           py::arg("overtaking_max"), py::arg("keep_indices"), py::arg("pin_memory"), py::arg("device"), py::arg("ahead"),
           py::arg("gpu_uuid"), py::arg("job_identity") = "", py::arg("rank") = std::pair(0U, 1U),
           py::arg("relay") = nullptr, py::arg("leaves_by_rank") = false, py::arg("own_keys") = std::nullopt)
      .def(
          "set_plan",
          [](PoolClient& self, const std::string& json, uint64_t change_count) {
            if (json.size() > wire::kPlanBytesMax) throw py::value_error("the text of a plan must be at most 64 KiB");
            self.set_plan(json, change_count);
          },
          py::arg("json"), py::arg("change_count"))
      .def(
          "put_blob",
          [](PoolClient& self, const std::string& id, std::string bytes) {
            self.put_blob(blob_id(id), std::move(bytes));
          },
          py::arg("id"), py::arg("bytes"))
      .def(
          "use_blobs",
          [](PoolClient& self, const std::vector<std::string>& ids) {
            std::vector<BlobId> blobs;
            std::transform(ids.begin(), ids.end(), std::back_inserter(blobs), &blob_id);
            self.use_blobs(std::move(blobs));
          },
          py::arg("ids"))
      .def(
          "set_lanes",
          [](PoolClient& self, const std::map<uint32_t, std::pair<uint64_t, std::string>>& places) {
            std::map<wire::Lane, pool_client::LanePlaces::Place> lanes;
            for (const auto& [shard_id, place] : places) {
              const auto state = std::as_bytes(std::span(place.second));
              lanes.emplace(shard_id + 1, pool_client::LanePlaces::Place{.batch_count = place.first,
                                                                         .state = {state.begin(), state.end()}});
            }
            self.set_lanes(std::move(lanes));
          },
          py::arg("places"))
      .def("lose_own_worker", &PoolClient::lose_own_worker, py::arg("worker_id"))
      .def_property_readonly("open_worker_count", &PoolClient::open_worker_count)
      .def_property_readonly("workers_apart", &PoolClient::workers_apart)
      .def("describe_pool", &PoolClient::describe_pool, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("controller_silence_s", [](const PoolClient& self) {
        const auto silence = self.time_since_controller();
        return silence ? std::optional(std::chrono::duration<double>(*silence).count()) : std::nullopt;
      });
}

using replica::Relay;

namespace {

using Seat = std::tuple<std::string, std::string, std::string>;  // name, key, handover
// The name of a leaf, whether this rank reads it, and whether each follower does.
using Readers = std::tuple<std::string, bool, std::vector<bool>>;

Result<std::shared_ptr<Relay>> start(const ReplicaKeys& keys, std::string leader, std::string bind_host,
                                     const std::vector<Seat>& followers, uint64_t arena_bytes, uint64_t held_bytes_max,
                                     const std::vector<Readers>& leaves) {
  std::vector<replica::FollowerSeat> seats;
  for (const auto& [name, key_text, handover] : followers) {
    auto key = net::PublicKey::parse(key_text);
    if (!key) return key.error();
    seats.push_back({.name = name, .key = key.value(), .handover = handover});
  }
  std::vector<replica::LeafReaders> readers;
  for (const auto& [name, is_read_here, by_follower] : leaves) {
    if (by_follower.size() != followers.size()) throw py::value_error("a leaf needs one entry for each follower");
    readers.push_back({.name = name, .is_read_here = is_read_here, .followers = by_follower});
  }
  auto pair = keys.copy();
  if (!pair) return pair.error();
  return Relay::start({.leader = std::move(leader),
                       .keys = std::move(pair).value(),
                       .bind_host = std::move(bind_host),
                       .arena_bytes = arena_bytes,
                       .held_bytes_max = held_bytes_max,
                       .followers = std::move(seats),
                       .leaves = std::move(readers)});
}

}  // namespace

void bind_replica(py::module_& module) {
  py::class_<ReplicaKeys, std::shared_ptr<ReplicaKeys>>(module, "ReplicaKeys")
      .def(py::init<>())
      .def_property_readonly("public_key", &ReplicaKeys::public_key);
  py::class_<Relay, std::shared_ptr<Relay>>(module, "Relay")
      .def(py::init([](const ReplicaKeys& keys, const std::string& leader, const std::string& bind_host,
                       const std::vector<Seat>& followers, uint64_t arena_bytes, uint64_t held_bytes_max,
                       const std::vector<Readers>& leaves) {
             return unwrap(without_gil(
                 [&] { return start(keys, leader, bind_host, followers, arena_bytes, held_bytes_max, leaves); }));
           }),
           py::kw_only(), py::arg("keys"), py::arg("leader"), py::arg("bind_host"), py::arg("followers"),
           py::arg("arena_bytes"), py::arg("held_bytes_max"), py::arg("leaves") = std::vector<Readers>())
      .def_property_readonly("addresses",
                             [](const Relay& self) {
                               std::vector<std::tuple<uint64_t, std::string, std::string>> addresses;
                               for (const auto& address : self.addresses())
                                 addresses.emplace_back(address.worker_id, address.endpoint, address.handover);
                               return addresses;
                             })
      .def_property_readonly("awaited_follower",
                             [](const Relay& self) -> std::optional<std::pair<std::string, double>> {
                               const auto awaited = self.awaited_follower();
                               if (!awaited) return std::nullopt;
                               return std::pair(awaited->first, std::chrono::duration<double>(awaited->second).count());
                             })
      .def_property_readonly("handed_count", &Relay::handed_count)
      .def("close", &Relay::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace penstock::bindings
