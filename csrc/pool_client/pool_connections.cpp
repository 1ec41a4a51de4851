// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_connections.h"

#include <utility>

#include "net/client_socket.h"
#include "shm/channel.h"

namespace penstock::pool_client {

PoolConnections::PoolConnections(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory)
    : options_(options), run_(run), directory_(std::move(directory)) {
  const auto own_key = directory_.own_key();
  own_workers_run_ = own_key ? net::run_id_of(*own_key, run_.secret) : run_.id;
}

Result<void> PoolConnections::open() {
  auto ready_set = net::ReadySet::open();
  if (!ready_set) return ready_set.error();
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  context_ = std::move(context).value();
  ready_set_ = std::move(ready_set).value();
  auto resolver = net::Resolver::open(options_.lookup);
  if (!resolver) return resolver.error();
  resolver_ = std::move(resolver).value();
  const auto tag = ready_set_->add(resolver_->fd());
  if (!tag) return tag.error();
  resolver_tag_ = tag.value();
  links_ = std::make_unique<WorkerLinks>(*ready_set_);
  return {};
}

void PoolConnections::close() {
  links_.reset();
  ready_set_.reset();
  controller_.reset();
  resolver_.reset();
  context_.reset();
}

Result<bool> PoolConnections::wait(int wake_fd, bool may_sleep, std::optional<Instant> due) {
  if (wake_tag_ == 0) {
    const auto tag = ready_set_->add(wake_fd);
    if (!tag) return tag.error();
    wake_tag_ = tag.value();
  }
  if (controller_) due = earlier(controller_->due_at(), due);
  due = earlier(due, links_->due_at());
  for (const auto& [worker_id, at] : connect_again_at_) due = earlier(due, at);
  auto timeout = wait_time(due, clock_now());
  // The set is polled even if the loop may not sleep: it reports links that have more messages than one turn takes.
  if (!may_sleep) timeout = std::chrono::milliseconds(0);
  const auto ready = ready_set_->wait(timeout);
  if (!ready) return ready.error();
  bool is_woken = false;
  for (const uint64_t tag : ready.value()) {
    is_woken = is_woken || tag == wake_tag_;
    if (tag == controller_tag_) is_controller_ready_ = true;
    if (tag == resolver_tag_) take_lookups();
    links_->note_ready(tag);
  }
  return is_woken;
}

void PoolConnections::take_lookups() {
  for (const std::string& host : resolver_->take_done()) {
    links_->note_looked_up(host);
    if (options_.controller && host == options_.controller->host) is_controller_ready_ = true;
  }
}

Result<void> PoolConnections::connect_to_controller() {
  auto controller = ControllerLink::connect(*context_, *resolver_, *options_.controller, options_.keys, clock_now());
  if (!controller) return controller.error();
  const auto tag = ready_set_->add(controller.value()->socket().waitables());
  if (!tag) return tag.error();
  controller_ = std::move(controller).value();
  controller_tag_ = tag.value();
  return {};
}

ControllerLink* PoolConnections::take_ready_controller(Instant now) {
  if (!controller_) return nullptr;
  if (!std::exchange(is_controller_ready_, false) && now < controller_->due_at()) return nullptr;
  ready_set_->mark_used(controller_tag_);  // even if no wait has reported it
  return controller_.get();
}

Result<void> PoolConnections::connect(uint64_t worker_id, const PoolDirectory::Place& place,
                                      const net::Endpoint& endpoint) {
  auto socket = place.key ? net::ClientSocket::connect(*context_, *resolver_, endpoint, place.keys.own(), *place.key)
                          : net::ClientSocket::connect(*context_, *resolver_, endpoint, place.keys, net::Role::kWorker);
  const auto opened = socket ? links_->open(worker_id, endpoint, std::move(socket).value()) : socket.error();
  // Most likely no descriptor was left. The session requests a connection only once, so the retry happens here.
  if (!opened) connect_again_at_[worker_id] = clock_now() + kReconnectPause;
  return opened;
}

std::vector<uint64_t> PoolConnections::due_again(Instant now) const {
  std::vector<uint64_t> worker_ids;
  for (const auto& [worker_id, at] : connect_again_at_) {
    if (now >= at) worker_ids.push_back(worker_id);
  }
  return worker_ids;
}

void PoolConnections::begin_link(uint64_t worker_id, uint32_t number, const wire::SealOffer& offer) {
  links_->begin_link(worker_id, {.trainer_id = run_id_with(worker_id), .worker_id = worker_id, .link = number}, offer);
}

Result<void> PoolConnections::connect_handover(uint64_t worker_id, uint32_t number, loader::Counter& arenas) {
  WorkerLink& link = *links_->find(worker_id);
  const auto place = directory_.find(worker_id);
  if (!place || place->handover.empty() || link.is_handover_given_up) return {};
  auto channel = shm::Channel::connect(place->handover);
  const wire::HandoverHello hello{.trainer_id = run_id_with(worker_id), .link = number};
  const auto sent = channel ? channel.value().send_record(hello) : channel.error();
  if (!sent && sent.error().code == Errc::kClosed) return {};  // the worker has died, which its other socket reports
  if (!sent) {
    link.is_handover_given_up = true;
    return sent;
  }
  link.passed().emplace(std::move(channel).value(), passed_views_, arenas);
  return {};
}

Result<void> PoolConnections::connect_data(uint64_t worker_id, const wire::SealGrant& grant) {
  return links_->connect_data(worker_id, *context_, *resolver_, grant);
}

}  // namespace penstock::pool_client
