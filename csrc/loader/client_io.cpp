// SPDX-License-Identifier: Apache-2.0
#include "loader/client_io.h"

#include <algorithm>
#include <utility>

#include "base/identity.h"
#include "base/live_clock.h"

namespace penstock::loader {

using net::Socket;
using shm::FdMessage;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using wire::Descriptor;
using wire::DescriptorKind;

namespace {

constexpr auto kHandshakeTimeout = milliseconds(5000);
constexpr auto kLossGrace = milliseconds(2000);  // for ZeroMQ to see the end of a worker that hung up
constexpr auto kLossInterval = milliseconds(1);  // how often that is looked for

}  // namespace

ClientIo::ClientIo(const ClientIoOptions& options)
    : BatchSource(options.arrival_count_max),
      options_(options),
      endpoint_(make_endpoint_name()),
      channels_(options.worker_count),
      loop_("pk_client_io", "which receives batches of local workers", *this) {
  if (options_.any_worker_depth > 0) dispatch_.emplace(options_.worker_count, options_.any_worker_depth);
  auto listener = shm::FdListener::bind(endpoint_);
  if (listener) {
    listener_.emplace(std::move(listener).value());
  } else {
    listen_error_ = listener.error().message;
  }
}

ClientIo::~ClientIo() { stop(); }

Result<void> ClientIo::start(Stages stages) {
  if (!listener_) return Fault{Errc::kNoMemory, listen_error_};
  if (auto started = stages_.start(std::move(stages)); !started) return started;
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  context_ = std::move(context).value();
  return loop_.start();
}

void ClientIo::stop() {
  inbox_.close();
  stages_.close();
  loop_.stop();
  stages_.stop();
  context_.reset();
  if (listener_) listener_->shut_down();
  listener_.reset();
}

void ClientIo::fetch(const std::shared_ptr<cluster::RequestContent>& content) {
  const wire::Request& request = content->request;
  if (options_.any_worker_depth == 0)
    return send(worker_of(request.shard_id), wire::write_message(request, content->indices));
  loop_.post([this, content] {
    dispatch_->ask({.epoch = content->request.epoch, .sequence = content->request.sequence}, content, clock_now());
    send_dispatched();
  });
}

void ClientIo::announce(const wire::Request& request, std::span<const std::byte> body) {
  auto message = wire::write_message(request, body);
  const bool is_epoch = request.kind == wire::RequestKind::kEpoch || request.kind == wire::RequestKind::kEarlyEpoch;
  if (is_epoch && options_.any_worker_depth > 0) {
    loop_.post([this, kind = request.kind, epoch = request.epoch, message = std::move(message)]() mutable {
      dispatch_->announce(kind, epoch, std::move(message), clock_now());
      send_dispatched();
    });
    return;
  }
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) send(worker_id, message);
}

void ClientIo::send(uint32_t worker_id, std::vector<std::byte> message) {
  loop_.post([this, worker_id, message = std::move(message)]() mutable { transmit(worker_id, std::move(message)); });
}

void ClientIo::dismiss(uint32_t worker_id) {
  loop_.post([this, worker_id] {
    Channel& channel = channels_[worker_id];
    channel.is_dismissed = true;
    if (channel.passed) channel.passed->connection().shut_down();
  });
}

Result<void> ClientIo::begin() {
  for (Channel& channel : channels_) {
    channel.name = make_endpoint_name();
    auto socket = Socket::bind(*context_, channel.name);
    if (!socket) return socket.error();
    channel.socket = std::move(socket).value();
    sockets_.push_back(channel.socket.get());
  }
  return {};
}

Result<void> ClientIo::serve() {
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) receive_from(worker_id);
  pending_count_ = report_losses();
  if (dispatch_) {
    dispatch_->tick(clock_now());
    send_dispatched();
  }
  return {};
}

Result<bool> ClientIo::wait(int wake_fd, bool may_sleep) {
  if (!may_sleep) return false;
  fds_.assign({wake_fd, listener_->fd()});
  for (const Channel& channel : channels_) fds_.push_back(is_watched(channel) ? channel.passed->fd() : -1);
  for (const Newcomer& newcomer : newcomers_) fds_.push_back(newcomer.connection.fd());
  if (fds_.size() > readable_count_) {
    readable_count_ = fds_.size();
    is_readable_ = std::make_unique<bool[]>(readable_count_);
  }
  const std::span<bool> readable(is_readable_.get(), fds_.size());
  // The end of a lost worker is looked for often, and that of a silent newcomer less often.
  auto timeout = newcomers_.empty() ? milliseconds(-1) : milliseconds(kHandshakeTimeout);
  if (const auto next = dispatch_ ? dispatch_->next_tick() : std::nullopt) {
    const auto until = std::max(milliseconds(1), std::chrono::ceil<milliseconds>(*next - clock_now()));
    timeout = timeout < milliseconds(0) ? until : std::min(timeout, until);
  }
  if (pending_count_ > 0) timeout = kLossInterval;
  if (const auto waited = Socket::wait(sockets_, fds_, readable, timeout); !waited) return waited.error();
  if (readable[1]) accept_workers();
  if (!newcomers_.empty()) greet_newcomers();
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) {
    if (readable[2 + worker_id]) check_connection(worker_id);
  }
  return static_cast<bool>(readable[0]);
}

void ClientIo::end() {
  for (Channel& channel : channels_) {
    if (channel.passed) channel.passed->connection().shut_down();
  }
  sockets_.clear();
  newcomers_.clear();
  channels_.clear();  // sockets die on the thread that made them
}

void ClientIo::accept_workers() {
  for (;;) {
    auto connection = listener_->accept();
    if (!connection) {
      if (connection.error().code != Errc::kTimeout) stages_.fail(0, connection.error());
      return;
    }
    newcomers_.push_back(
        {.connection = std::move(connection).value(), .deadline = steady_clock::now() + kHandshakeTimeout});
  }
}

void ClientIo::greet_newcomers() {
  std::erase_if(newcomers_, [&](Newcomer& newcomer) {
    const auto hello = newcomer.connection.receive(steady_clock::now());
    if (!hello && hello.error().code == Errc::kTimeout) return steady_clock::now() >= newcomer.deadline;
    if (hello && hello.value().message.kind == shm::kFdHello)
      welcome(hello.value().message.worker_id, std::move(newcomer.connection));
    return true;  // it is a worker's now, or it is none of our workers
  });
}

void ClientIo::welcome(uint32_t worker_id, shm::FdConnection connection) {
  if (worker_id >= options_.worker_count || channels_[worker_id].passed) return;
  Channel& channel = channels_[worker_id];
  channel.passed.emplace(std::move(connection), views_, inbox_.counters().arenas,
                         wire::kSharedFileCountMax * options_.arrival_count_max);
  FdMessage start{.kind = shm::kFdStart, .worker_id = worker_id};
  channel.name.copy(start.text, sizeof start.text - 1);
  if (auto sent = channel.passed->connection().send(start); !sent) stages_.fail(worker_id, sent.error());
}

void ClientIo::send_dispatched() {
  for (auto& send : dispatch_->take_sends()) transmit(send.worker_id, std::move(send.message));
  for (const auto& failure : dispatch_->take_failures()) {
    const std::string text = std::to_string(failure.death_count) +
                             " workers died one after the other while they made " + wire::to_text(failure.key) +
                             "; look there for the cause (memory, a crash in native code): run it with "
                             "num_workers=0";
    stages_.arrive({.kind = Arrival::Kind::kBatch,
                    .epoch = failure.key.epoch,
                    .sequence = failure.key.sequence,
                    .batch = Batch::from_error({.sequence = failure.key.sequence, .epoch = failure.key.epoch},
                                               {.type_name = "RuntimeError", .text = text, .worker = {}}),
                    .error = {}});
  }
}

void ClientIo::transmit(uint32_t worker_id, std::vector<std::byte> message) {
  Channel& channel = channels_[worker_id];
  if (channel.is_dismissed || channel.is_lost) return;
  if (!channel.is_ready) {
    channel.waiting.push_back(std::move(message));
    return;
  }
  // The loss of a peer shows on its connection, where the batches that it still owed are reported.
  static_cast<void>(channel.socket->send(message));
}

void ClientIo::receive_from(uint32_t worker_id) {
  net::MessageParts parts;
  for (;;) {
    auto received = channels_[worker_id].socket->try_receive(parts);
    if (!received) return stages_.fail(worker_id, received.error());
    if (!received.value()) return;
    receive_descriptor(worker_id, parts);
  }
}

void ClientIo::receive_descriptor(uint32_t worker_id, net::MessageParts& parts) {
  Channel& channel = channels_[worker_id];
  auto parsed = wire::parse_descriptor(parts.front());
  if (!parsed) return stages_.fail(worker_id, parsed.error());
  const Descriptor& descriptor = parsed.value();
  const bool is_of_other_epoch = descriptor.kind != DescriptorKind::kHello && inbox_.is_stale(descriptor.epoch);
  if (descriptor.worker_id != worker_id) {
    return stages_.fail(worker_id,
                        {Errc::kMalformed, "worker " + std::to_string(worker_id) + " answered in the name of worker " +
                                               std::to_string(descriptor.worker_id)});
  }
  switch (descriptor.kind) {
    case DescriptorKind::kHello:
      channel.is_ready = true;
      for (const auto& message : channel.waiting) static_cast<void>(channel.socket->send(message));
      channel.waiting.clear();
      if (dispatch_) {
        dispatch_->worker_came(worker_id, clock_now());
        send_dispatched();
      }
      return;
    case DescriptorKind::kEnd:
      if (is_of_other_epoch) return;
      return stages_.arrive({.kind = Arrival::Kind::kEnd,
                             .worker_id = worker_id,
                             .epoch = descriptor.epoch,
                             .sequence = descriptor.sequence,
                             .state = parts.size() == 2 ? std::move(parts[1]) : std::vector<std::byte>(),
                             .batch = {},
                             .error = {}});
    case DescriptorKind::kStates:
      return inbox_.arrive_states(parts.size() == 2 ? std::move(parts[1]) : std::vector<std::byte>());
    case DescriptorKind::kSlab:
    case DescriptorKind::kInline: break;
  }
  auto batch = make_batch(channel, descriptor, parts);
  if (!batch) return stages_.fail(worker_id, batch.error());
  bool counts = true;
  if (dispatch_) {
    const bool dataset_stays = (descriptor.flags & wire::kDescriptorDatasetStays) != 0;
    counts = dispatch_->answered(worker_id, {.epoch = descriptor.epoch, .sequence = descriptor.sequence}, dataset_stays,
                                 clock_now());
    send_dispatched();
  }
  if (is_of_other_epoch || !counts) {  // its slab goes back as the batch dies here
    inbox_.counters().stale_batches.add(1);
    return;
  }
  stages_.arrive({.kind = Arrival::Kind::kBatch,
                  .worker_id = worker_id,
                  .epoch = descriptor.epoch,
                  .sequence = descriptor.sequence,
                  .batch = std::move(batch).value(),
                  .error = {}});
}

Result<std::unique_ptr<Batch>> ClientIo::make_batch(Channel& channel, const Descriptor& descriptor,
                                                    net::MessageParts& parts) {
  constexpr bool kAllowPickle = true;  // local workers are this process's own children
  if (descriptor.kind == DescriptorKind::kInline) {
    if (parts.size() != 2) return Fault{Errc::kMalformed, "an inline batch did not come in two parts"};
    inbox_.counters().inline_batches.add(1);
    std::vector<std::byte> record(parts[0].begin() + sizeof descriptor, parts[0].end());
    auto batch = Batch::from_parts(descriptor, std::move(record), std::move(parts[1]), kAllowPickle);
    if (batch && batch.value()->is_narrow())
      return Fault{Errc::kMalformed, "a batch of this machine has tensors that are written for a link"};
    if (!channel.passed) return Fault{Errc::kMalformed, "a worker named memory before it connected"};
    return with_files(*channel.passed, std::move(batch));
  }
  if (!channel.passed) return Fault{Errc::kMalformed, "a worker named memory before it connected"};
  auto lease = channel.passed->lease({.arena_id = descriptor.arena_id,
                                      .slab_index = descriptor.slab_index,
                                      .generation = descriptor.slab_generation,
                                      .is_transient = (descriptor.flags & wire::kDescriptorTransient) != 0,
                                      .slab_bytes = descriptor.slab_bytes});
  if (!lease) return lease.error();
  auto batch = Batch::from_slab(descriptor, std::move(lease).value(), kAllowPickle);
  if (batch && batch.value()->is_narrow())
    return Fault{Errc::kMalformed, "a batch in shared memory has tensors that are written for a link"};
  return with_files(*channel.passed, std::move(batch));
}

Result<std::unique_ptr<Batch>> ClientIo::with_files(PassedMemory& passed, Result<std::unique_ptr<Batch>> batch) {
  const uint32_t file_count = batch ? batch.value()->frame().shared_file_count() : 0;
  if (file_count == 0) return batch;
  auto files = passed.take_files(file_count);
  if (!files) return files.error();
  if (auto set = batch.value()->set_shared_files(std::move(files).value()); !set) return set.error();
  return batch;
}

void ClientIo::check_connection(uint32_t worker_id) {
  Channel& channel = channels_[worker_id];
  if (!is_watched(channel)) return;
  const auto received = channel.passed->receive();
  if (received || received.error().code == Errc::kTimeout) return;
  if (received.error().code != Errc::kClosed) return stages_.fail(worker_id, received.error());
  channel.hung_up_at = steady_clock::now();
}

bool ClientIo::is_watched(const Channel& channel) {
  return channel.passed && !channel.hung_up_at && !channel.is_dismissed;
}

// The batches of a worker that died travel on another socket than the news of its death, and are worth having: it
// counts as lost when ZeroMQ has seen the end of it too. Returns how many workers are still between the two.
size_t ClientIo::report_losses() {
  size_t pending_count = 0;
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) {
    Channel& channel = channels_[worker_id];
    if (!channel.hung_up_at || channel.is_lost || channel.is_dismissed) continue;
    const bool may_send = channel.socket->has_peer() || !channel.is_ready;  // or ZeroMQ has not seen it arrive yet
    if (may_send && steady_clock::now() - *channel.hung_up_at < kLossGrace) {
      ++pending_count;
      continue;
    }
    receive_from(worker_id);
    channel.is_lost = true;
    if (channel.passed) channel.passed->drop_files();
    lose(worker_id);
  }
  return pending_count;
}

void ClientIo::lose(uint32_t worker_id) {
  auto kind = Arrival::Kind::kLost;
  if (dispatch_) {
    dispatch_->worker_died(worker_id, clock_now());
    if (dispatch_->has_workers()) kind = Arrival::Kind::kGone;
  }
  stages_.arrive({.kind = kind, .worker_id = worker_id, .batch = {}, .error = {}});
  if (dispatch_) send_dispatched();
}

}  // namespace penstock::loader
