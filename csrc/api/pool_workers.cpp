// SPDX-License-Identifier: Apache-2.0
#include "api/pool_workers.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "api/exceptions.h"
#include "api/index_order.h"
#include "api/native_job.h"
#include "api/surroundings.h"
#include "api/worker_set.h"
#include "base/file_descriptor.h"
#include "base/process.h"
#include "dataset/nest_value.h"
#include "net/key_folder.h"
#include "pool_client/pool_directory.h"
#include "runtime/numeric_fingerprint.h"

namespace penstock::api {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kStartMax = std::chrono::seconds(300);  // Python processes may import torch one after the other
constexpr auto kEndMax = std::chrono::seconds(5);

// PENSTOCK_WORKER overrides the installed program.
std::string native_program() {
  if (std::string given = environment("PENSTOCK_WORKER").value_or(""); !given.empty()) return given;
  return program_next_to_library("penstock-worker");
}

std::vector<std::string> command_of(OwnProcesses::Kind kind, const std::string& handover, int report_fd) {
  const std::vector<std::string> arguments = {
      "--handover", handover, "--report-fd", std::to_string(report_fd), "--parent", std::to_string(::getpid())};
  std::vector<std::string> command;
  if (kind == OwnProcesses::Kind::kNative) {
    command = {native_program(), "--own"};
  } else {
    const std::string python = environment("PENSTOCK_PYTHON").value_or("");
    command = {python.empty() ? "python3" : python, "-m", "penstock.pool.own_process"};
  }
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

Fault not_listening(OwnProcesses::Kind kind, int64_t count, ChildProcess& process, const std::string& program) {
  const bool has_ended = process.wait_until(steady_clock::now() + milliseconds(500));
  std::string text = "a local DataLoader worker (num_workers=" + std::to_string(count) + ", " + program +
                     ") has not opened its port and " + (has_ended ? process.poll()->describe() : "is still starting") +
                     "; check its output on stderr";
  if (kind == OwnProcesses::Kind::kPython)
    text += "; it requires a Python with penstock: PENSTOCK_PYTHON, or python3 on PATH";
  return {Errc::kFailed, std::move(text)};
}

}  // namespace

Result<OwnProcesses> OwnProcesses::start(Kind kind, int64_t count) {
  // Created before the workers start: a worker that is killed while creating it could leave it incomplete.
  if (auto folder = net::shared_key_folder(); !folder) return folder.error();
  OwnProcesses own;
  std::vector<FileDescriptor> pipes;
  std::vector<std::string> handovers;
  std::string program;
  for (int64_t index = 0; index < count; ++index) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      return Fault{Errc::kNoMemory, std::string("starting worker processes failed: ") + std::strerror(errno) +
                                        "; raise the limit of open files (ulimit -n)"};
    }
    pipes.emplace_back(ends[0]);
    const FileDescriptor report(ends[1]);
    handovers.push_back(make_endpoint_name());
    const auto command = command_of(kind, handovers.back(), report.get());
    program = command[0];
    auto started = ChildProcess::start({.command = command, .passed_fd = report.get()});
    if (!started) {
      const char* hint =
          kind == Kind::kPython
              ? "; its dataset is a Python object: install a Python with penstock on this machine and set "
                "PENSTOCK_PYTHON to it, or use only a pool (num_workers=0)"
              : "; set PENSTOCK_WORKER to the program penstock-worker, which is installed next to the library";
      return Fault{Errc::kUnsupported, started.error().message + hint};
    }
    own.processes_.push_back(std::move(started).value());
  }
  const auto deadline = steady_clock::now() + kStartMax;
  for (size_t index = 0; index < own.processes_.size(); ++index) {
    // "ID ENDPOINT", sent once the worker listens.
    const auto read = read_line_until(pipes[index].get(), deadline);
    const std::string line = read ? read.value() : std::string();
    const size_t space = line.find(' ');
    uint64_t id = 0;
    std::from_chars(line.data(), line.data() + line.size(), id);
    auto endpoint = space != std::string::npos ? net::Endpoint::parse(line.substr(space + 1))
                                               : Result<net::Endpoint>(Fault{Errc::kMalformed, ""});
    if (!endpoint || id == 0) return not_listening(kind, count, own.processes_[index], program);
    own.workers_.push_back({.worker_id = id, .endpoint = std::move(endpoint).value(), .handover = handovers[index]});
  }
  return own;
}

OwnProcesses::~OwnProcesses() {
  for (ChildProcess& process : processes_) process.signal(SIGTERM);
  const auto deadline = steady_clock::now() + kEndMax;
  for (ChildProcess& process : processes_) static_cast<void>(process.wait_until(deadline));
}

std::vector<OwnProcesses::Loss> OwnProcesses::take_losses() {
  std::vector<Loss> losses;
  for (size_t index = 0; index < processes_.size(); ++index) {
    if (lost_.contains(index)) continue;
    const auto& end = processes_[index].poll();
    if (!end) continue;
    lost_.insert(index);
    losses.push_back({.worker_id = workers_[index].worker_id, .pid = processes_[index].pid(), .how = end->describe()});
  }
  return losses;
}

using pool_client::PoolClient;
using pool_client::PoolSource;
using std::chrono::steady_clock;

namespace {

constexpr uint32_t kWorkersOfUseMax = 4096;       // for a map-style dataset
constexpr auto kQuiet = std::chrono::seconds(5);  // time without any worker before the user is warned
constexpr auto kCheckInterval = std::chrono::seconds(1);

std::string program_name() {
  std::array<char, PATH_MAX> path{};
  const ssize_t bytes = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  const std::string name = bytes > 0 ? path.data() : "program";
  return name.substr(name.rfind('/') + 1);
}

// The folder of the pool's keys; none for the keys that this user's processes share.
std::optional<std::string> chosen_keys(const Options& options) {
  auto folder = options.keys.empty() ? environment("PENSTOCK_KEYS") : options.keys;
  return folder && !folder->empty() ? folder : std::nullopt;
}

net::KeyRing load_keys(const std::optional<std::string>& folder) {
  return value_or_raise(net::load_keys(folder, net::Role::kTrainer));
}

dataset::JobText job_of(const AnyDataset& dataset, const Options& options,
                        const std::optional<wire::BlobId>& transform) {
  dataset::JobText job{.name = {},
                       .dataset = {},
                       .batch_size = options.batch_size,
                       .drop_last = options.drop_last,
                       .shard_count = std::max<int64_t>(1, options.shards.value_or(options.num_workers)),
                       .transform = transform};
  if (const auto* plugin = std::get_if<PluginDataset>(&dataset.kind())) {
    job.dataset = *plugin;
    job.name = program_name() + ": " + plugin->name;
  } else {
    const auto& python = std::get<PythonDataset>(dataset.kind());
    job.dataset = python;
    job.name = program_name() + ": " + python.factory;
  }
  return job;
}

// Parses a worker's description of the dataset. Workers are not trusted, so every part of it is checked.
DatasetShape shape_of(loader::Batch& batch) {
  if (const auto& error = batch.record().remote_error()) {
    const std::string worker = error->worker.empty() ? "a worker" : "worker " + error->worker;
    throw Error(ErrorKind::kWorker, worker + " cannot describe the dataset: " + error->text);
  }
  const std::string worker = "worker " + format_id(batch.record().times().worker_id);
  const auto refuse = [&](const std::string& seen) {
    throw Error(ErrorKind::kWorker, worker + " must describe the dataset as a dict of 'iterable', a " +
                                        "bool, and 'size', an integer >= 0, or None for an iterable dataset; got " +
                                        seen + "; install the same version of penstock on both");
  };
  const auto said = dataset::read_value(batch.record().frame().nest, batch.tensors().all());
  if (!said) refuse(said.error().message);
  const Value* iterable = said.value().find("iterable");
  const Value* size = said.value().find("size");
  if (iterable == nullptr || size == nullptr || iterable->kind() != Value::Kind::kBoolean)
    refuse(said.value().describe());
  if (iterable->boolean()) {
    if (!size->is_none()) refuse("an iterable dataset of size " + size->describe());
    return {.is_iterable = true};
  }
  if (size->kind() != Value::Kind::kInteger) refuse("the size " + size->describe());
  if (size->integer() < 0) refuse("the size " + std::to_string(size->integer()));
  return {.sample_count = size->integer()};
}

std::string saved(const torch::jit::Module& module) {
  std::ostringstream stream;
  module.save(stream);
  return stream.str();
}

}  // namespace

PoolWorkers::PoolWorkers(const AnyDataset& dataset, const Options& options, std::optional<std::string> pool)
    : options_(options), key_folder_(chosen_keys(options)) {
  if (pool) {
    auto endpoint = net::Endpoint::parse(*pool);
    if (!endpoint)
      refuse("pool is '" + *pool + "', but must be the address of a controller, such as 'tcp://host:7000'");
    controller_ = std::move(endpoint).value();
  }
  std::optional<wire::BlobId> transform;
  if (options.transform) {
    transform_blob_ = saved(*options.transform);
    transform = blob_id_of(std::as_bytes(std::span(transform_blob_)));
  }
  job_ = job_of(dataset, options, transform);
  job_blob_ = dataset::write_job(job_);
  job_id_ = blob_id_of(std::as_bytes(std::span(job_blob_)));
  if (options.num_workers > 0) {
    const bool is_plugin = std::holds_alternative<PluginDataset>(job_.dataset);
    own_ = value_or_raise(OwnProcesses::start(is_plugin ? OwnProcesses::Kind::kNative : OwnProcesses::Kind::kPython,
                                              options.num_workers));
  }
  shape_ = request_shape();
  // A shard is read in order, so a single batch of it could not be made again.
  if (controller_ && !shape_.is_iterable) withhold_leaves(options_.timeout);
}

PoolWorkers::~PoolWorkers() {
  if (!client_) return;
  recall_all();
  client_->stop();
}

void PoolWorkers::start() {
  client_ = open_client(shape_.is_iterable, shard_count_of(shape_, options_));
  as_client_ = client_;
}

PoolWorkers::Client PoolWorkers::open_client(bool is_iterable, uint32_t shard_count) {
  const uint64_t arena = value_or_raise(arena_bytes());
  const auto folder = controller_ ? key_folder_ : std::nullopt;
  std::optional<net::KeyRing> own_keys;
  std::vector<pool_client::OwnWorker> own_workers;
  if (own_) {
    own_keys.emplace(load_keys(std::nullopt));
    for (const pool_client::OwnWorker& worker : own_->workers()) {
      const auto is_lost = [&](const OwnProcesses::Loss& loss) { return loss.worker_id == worker.worker_id; };
      if (std::none_of(losses_.begin(), losses_.end(), is_lost)) own_workers.push_back(worker);
    }
  }
  const std::optional<c10::Device> device = staged_device(options_);
  const JobPlace place = place_in_job(options_);
  const loader::ClientOptions of_client{.worker_count = 1,
                                        .prefetch_factor = static_cast<uint32_t>(options_.prefetch_factor),
                                        .shard_count = is_iterable ? shard_count : 1,
                                        .prefetch_bytes = static_cast<uint64_t>(options_.prefetch_bytes),
                                        .overtaking_max = overtaking_max(options_),
                                        .keep_workers = true,
                                        .keep_indices = false,
                                        .pin_memory = options_.pin_memory && !device,
                                        .device = device};
  net::KeyRing keys = load_keys(folder);
  const net::RunId run = net::draw_run_id(keys.own().public_key());
  auto source = std::make_unique<PoolSource>(
      pool_client::PoolIoOptions{
          .controller = controller_,
          .keys = std::move(keys),
          .job = job_.name,
          .about = host_name() + ", process " + std::to_string(::getpid()) + ", C++",
          .worker_count_max = is_iterable ? shard_count : kWorkersOfUseMax,
          .depth = of_client.prefetch_factor,
          .credit_bytes = arena,
          .arena_bytes = arena,
          .is_iterable = is_iterable,
          .job_kind =
              std::holds_alternative<PluginDataset>(job_.dataset) ? wire::JobKind::kPlugin : wire::JobKind::kPython,
          .torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR),
          .reported_size = reported_size_,
          .job_rank = pool_client::job_rank(pool_client::identity_of_launched_job(), job_.name,
                                            static_cast<uint32_t>(place.rank), static_cast<uint32_t>(place.world_size)),
          .numerics = runtime::numeric_fingerprint()},
      run, std::move(own_keys), std::move(own_workers));
  PoolSource& pool = *source;
  auto client = std::make_shared<PoolClient>(of_client, pool, std::move(source));
  client->put_blob(job_id_, job_blob_);
  if (job_.transform) client->put_blob(*job_.transform, transform_blob_);
  name_blobs(*client);
  api::check(client->start());
  return client;
}

void PoolWorkers::name_blobs(PoolClient& client) {
  std::vector<wire::BlobId> ids = {job_id_};
  const auto name = [&](std::span<const std::byte> bytes) {
    ids.push_back(blob_id_of(bytes));
    client.put_blob(ids.back(), {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  for (const Message& message : prefixes_) name(*message);
  if (shipment_) name(*shipment_);
  client.use_blobs(std::move(ids));
}

// Asks a worker that has loaded the dataset for its description, which the worker sends instead of a batch.
DatasetShape PoolWorkers::request_shape() {
  const Client client = open_client(false, 1);
  client->begin_epoch(wire::EpochSeeds().to_bytes());
  client->submit({});
  using Event = loader::Client::Event;
  const auto deadline =
      options_.timeout.count() > 0 ? steady_clock::now() + options_.timeout : steady_clock::time_point::max();
  for (;;) {
    Event event = client->try_next();
    switch (event.kind) {
      case Event::Kind::kBatch: {
        const DatasetShape shape = shape_of(*event.batch);
        reported_size_ = {.size = shape.is_iterable ? wire::kNoSize : static_cast<uint64_t>(shape.sample_count),
                          .by = format_id(event.batch->record().times().worker_id)};
        client->stop();
        return shape;
      }
      case Event::Kind::kFailed: throw Error(ErrorKind::kWorker, event.error->message);
      case Event::Kind::kShardEnded:
      case Event::Kind::kEnd: throw Error(ErrorKind::kWorker, "the workers have not described the dataset yet");
      case Event::Kind::kNews: TORCH_WARN(event.error->message); break;
      case Event::Kind::kNothing:
        if (!client->wait_until(std::min(deadline, steady_clock::now() + kCheckInterval))) look_after(*client);
        break;
      default: break;  // worker events
    }
    // The timeout covers the whole wait, including events that arrive meanwhile.
    if (steady_clock::now() >= deadline) {
      throw Error(ErrorKind::kTimeout,
                  "no worker described the dataset within the timeout: " + client->describe_pool());
    }
  }
}

void PoolWorkers::check() { look_after(*client_); }

void PoolWorkers::look_after(PoolClient& client) {
  if (own_) {
    for (OwnProcesses::Loss& loss : own_->take_losses()) {
      TORCH_WARN("a local DataLoader worker, process ", loss.pid, " on this host, ", loss.how,
                 "; other workers make its batches");
      client.lose_own_worker(loss.worker_id);
      losses_.push_back(std::move(loss));
    }
    if (own_->are_all_lost() && !controller_) raise_lost();
  }
  if (client.open_worker_count() > 0) {
    waiting_since_.reset();
    return;
  }
  const auto now = steady_clock::now();
  if (!waiting_since_) waiting_since_ = now;
  if (now - *waiting_since_ < kQuiet || std::exchange(is_wait_logged_, true)) return;
  TORCH_WARN("DataLoader is waiting for workers: ", client.describe_pool());
}

void PoolWorkers::raise_lost() const {
  std::string pids;
  for (const OwnProcesses::Loss& loss : losses_) pids += (pids.empty() ? "" : ", ") + std::to_string(loss.pid);
  throw Error(ErrorKind::kWorker, "DataLoader worker (pid(s) " + pids + ") exited unexpectedly: the last one " +
                                      losses_.back().how + ", and no worker is left; check its output on stderr");
}

void PoolWorkers::set_starts(const wire::EpochSeeds&, const ResumePoint& point) {
  if (!shape_.is_iterable) return;
  std::map<wire::Lane, pool_client::LanePlaces::Place> lanes;
  for (const auto& [shard_id, start] : point.starts) {
    pool_client::LanePlaces::Place place{.batch_count = start.batch_count};
    const auto state = point.shard_states.find(shard_id);
    if (state != point.shard_states.end()) place.state = value_or_raise(dataset::pack_value(state->second));
    lanes.emplace(shard_id + 1, std::move(place));
  }
  client_->set_lanes(std::move(lanes));
}

std::optional<c10::Device> PoolWorkers::device() const { return staged_device(options_); }

void PoolWorkers::use_prefixes(std::vector<Message> messages) {
  prefixes_ = std::move(messages);
  if (client_) name_blobs(*client_);
}

void PoolWorkers::use_shipment(std::optional<std::vector<std::byte>> shipment) {
  shipment_ = std::move(shipment);
  if (client_) name_blobs(*client_);
}

}  // namespace penstock::api
