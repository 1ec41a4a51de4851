// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "bindings/replica_keys.h"
#include "net/keys.h"
#include "replica/relay.h"

namespace py = pybind11;

namespace penstock::bindings {

using replica::Relay;

namespace {

using Seat = std::tuple<std::string, std::string, std::string>;  // name, key, handover

Result<std::shared_ptr<Relay>> start(const ReplicaKeys& keys, std::string leader, std::string bind_host,
                                     const std::vector<Seat>& followers, uint64_t arena_bytes,
                                     uint64_t held_bytes_max) {
  std::vector<replica::FollowerSeat> seats;
  for (const auto& [name, key_text, handover] : followers) {
    auto key = net::PublicKey::parse(key_text);
    if (!key) return key.error();
    seats.push_back({.name = name, .key = key.value(), .handover = handover});
  }
  auto pair = keys.copy();
  if (!pair) return pair.error();
  return Relay::start({.leader = std::move(leader),
                       .keys = std::move(pair).value(),
                       .bind_host = std::move(bind_host),
                       .arena_bytes = arena_bytes,
                       .held_bytes_max = held_bytes_max,
                       .followers = std::move(seats)});
}

}  // namespace

void bind_replica(py::module_& module) {
  py::class_<ReplicaKeys, std::shared_ptr<ReplicaKeys>>(module, "ReplicaKeys")
      .def(py::init<>())
      .def_property_readonly("public_key", &ReplicaKeys::public_key);
  py::class_<Relay, std::shared_ptr<Relay>>(module, "Relay")
      .def(py::init([](const ReplicaKeys& keys, const std::string& leader, const std::string& bind_host,
                       const std::vector<Seat>& followers, uint64_t arena_bytes, uint64_t held_bytes_max) {
             return unwrap(
                 without_gil([&] { return start(keys, leader, bind_host, followers, arena_bytes, held_bytes_max); }));
           }),
           py::kw_only(), py::arg("keys"), py::arg("leader"), py::arg("bind_host"), py::arg("followers"),
           py::arg("arena_bytes"), py::arg("held_bytes_max"))
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
