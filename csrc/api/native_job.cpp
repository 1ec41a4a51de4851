// SPDX-License-Identifier: Apache-2.0
#include "api/native_job.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <limits.h>
#include <torch/csrc/jit/serialization/import.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <sstream>
#include <string_view>
#include <utility>

#include "api/surroundings.h"
#include "base/clock.h"
#include "base/process.h"
#include "dataset/nest_value.h"
#include "graph/sha256.h"
#include "penstock/error.h"
#include "penstock/plugin.h"
#include "wire/epoch_seeds.h"

namespace penstock::api {

wire::BlobId blob_id_of(std::span<const std::byte> bytes) {
  graph::Sha256 hash;
  hash.update(bytes);
  const auto digest = hash.finish();
  wire::BlobId id{};
  std::transform(digest.begin(), digest.end(), id.begin(), [](uint8_t byte) { return std::byte{byte}; });
  return id;
}

namespace {

[[noreturn]] void refuse_plugin(const std::string& text) { throw Error(ErrorKind::kUnsupported, text); }

std::string_view minor_of(std::string_view version) { return version.substr(0, version.rfind('.')); }

}  // namespace

AnyDataset make_dataset_of(const PluginDataset& plugin) {
  const std::string subject = "the plug-in " + plugin.path;
  // RTLD_NOW: a missing symbol is reported here, not in the middle of a batch.
  void* library = ::dlopen(plugin.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    refuse_plugin(subject + " cannot be loaded: " + (why != nullptr ? why : "unknown reason") +
                  "; install it on the worker's machine, built against the worker's versions of penstock and torch");
  }
  using Ask = const PluginEntry* (*)();
  const auto ask = reinterpret_cast<Ask>(::dlsym(library, ("penstock_dataset_" + plugin.name).c_str()));
  if (ask == nullptr) {
    refuse_plugin(subject + " does not define the dataset '" + plugin.name + "'; add PENSTOCK_DATASET(" + plugin.name +
                  ", factory) to it, in the global namespace");
  }
  const PluginEntry& entry = *ask();
  if (minor_of(entry.penstock_version) != minor_of(PENSTOCK_VERSION)) {
    refuse_plugin(subject + " was built for penstock " + entry.penstock_version + ", and this is penstock " +
                  PENSTOCK_VERSION + "; rebuild it");
  }
  check_torch(entry.torch, subject);
  try {
    AnyDataset made = entry.make(plugin.arguments);
    if (!made.by_index() && !made.as_streams())
      refuse_plugin(subject + ": the factory of '" + plugin.name + "' returned no dataset");
    return made;
  } catch (const Error& error) {
    throw Error(error.kind(), subject + ": the factory of '" + plugin.name + "' failed: " + error.what());
  } catch (const std::exception& error) {
    throw Error(ErrorKind::kDataset, subject + ": the factory of '" + plugin.name + "' failed: " + error.what());
  }
}

using server::PoolWork;
using worker::BatchServer;

namespace {

// Allocates in the slab that a batch is sent from or, when the slab is full, on the heap, from which sealing copies.
class SlabMemory final : public dataset::Memory {
 public:
  explicit SlabMemory(worker::SlabWriter& writer) : writer_(writer) {}
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    at::Tensor tensor = writer_.empty(sizes, dtype);
    return tensor.defined() ? tensor : at::empty(sizes, at::TensorOptions().dtype(dtype));
  }

 private:
  worker::SlabWriter& writer_;
};

// Identifies this process for a user on another machine, for example in the report of a missing file.
std::string place_of_process() {
  std::array<char, PATH_MAX> folder{};
  const bool has_folder = ::getcwd(folder.data(), folder.size()) != nullptr;
  return host_name() + ", process " + std::to_string(::getpid()) + ", working directory " +
         (has_folder ? folder.data() : "which no longer exists");
}

std::optional<BatchTransform> load_transform(std::span<const std::byte> bytes) {
  std::istringstream stream(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  return BatchTransform(torch::jit::load(stream));
}

std::span<const int64_t> integers_of(std::span<const std::byte> bytes, std::vector<int64_t>& copy) {
  copy.resize(bytes.size() / sizeof(int64_t));
  std::memcpy(copy.data(), bytes.data(), copy.size() * sizeof(int64_t));
  return copy;
}

}  // namespace

Result<std::unique_ptr<NativeJob>> NativeJob::open(std::span<const std::byte> blob, const FetchBlob& fetch) {
  auto text = dataset::read_job(blob);
  if (!text) return text.error();
  const std::string begin = "the job '" + text.value().name + "' cannot run here: ";
  const auto* plugin = std::get_if<PluginDataset>(&text.value().dataset);
  if (plugin == nullptr) {
    return Fault{
        Errc::kUnsupported,
        begin + "its dataset is a Python object, but this worker runs only plug-ins; start `penstock worker` for it"};
  }
  try {
    std::optional<BatchTransform> transform;
    if (text.value().transform) {
      const auto bytes = fetch(*text.value().transform);
      if (!bytes) return bytes.error();
      transform = load_transform(bytes.value());
    }
    const AnyDataset dataset = make_dataset_of(*plugin);
    return std::make_unique<NativeJob>(std::move(text).value(), dataset, std::move(transform));
  } catch (const std::exception& error) {
    return Fault{Errc::kUnsupported, begin + "on this worker (" + place_of_process() + "), " + error.what()};
  } catch (...) {
    return Fault{Errc::kUnsupported,
                 begin + "on this worker (" + place_of_process() + "), its dataset raised " + current_exception_name()};
  }
}

NativeJob::NativeJob(dataset::JobText text, const AnyDataset& dataset, std::optional<BatchTransform> transform)
    : text_(std::move(text)),
      size_(dataset.by_index() ? dataset.by_index()->size() : 0),
      reader_(dataset.by_index(), dataset.as_streams(),
              {.batch_size = text_.batch_size,
               .drop_last = text_.drop_last,
               .shard_count = text_.shard_count,
               .collate_fn = {},
               .seeds_default_generator = true}),
      transform_(std::move(transform)) {}

Value NativeJob::describe() const {
  return Value::dict({{"iterable", reader_.is_iterable()}, {"size", reader_.is_iterable() ? Value() : Value(size_)}});
}

Result<void> NativeJob::answer(BatchServer& server, const PoolWork& work) {
  if (work.is_recall()) {
    auto kept = server.answer_kept(work);
    if (!kept) return kept.error();
    if (kept.value()) return {};
  }
  server.writer().begin();
  const uint32_t shard_id = work.lane == wire::kNoLane ? 0 : static_cast<uint32_t>(work.lane - 1);
  const bool is_description = work.lane == wire::kNoLane && work.index_kind == wire::IndexKind::kNone;
  BatchServer::Failure failure;
  try {
    const at::NoGradGuard no_grad;
    if (is_description) return send(server, work, describe(), {});
    if (reader_.is_iterable()) find_lane(work, shard_id);
    const auto batch = make(server, work);
    if (!batch) {
      server.answer_end(work);
      return {};
    }
    auto sent = send(server, work, *batch, reader_.is_iterable() ? state_of(shard_id) : std::vector<std::byte>());
    if (sent || sent.error().code == Errc::kClosed) return sent;
    failure = {.type_name = "penstock::Error", .text = sent.error().message};
  } catch (const std::exception& error) {
    failure = {.type_name = current_exception_name(), .text = error.what()};
  } catch (...) {
    failure = {.type_name = current_exception_name(), .text = "not a std::exception"};
  }
  const std::string sample = reader_.in_hand();
  failure.text =
      place_of_process() + std::string(1, '\0') + (sample.empty() ? "" : "  (" + sample + ")\n") + failure.text;
  std::vector<std::byte> state;
  try {
    if (reader_.is_iterable()) state = state_of(shard_id);
  } catch (...) {
    // Without the state another worker reads the shard again. Only the first error is reported.
  }
  return server.answer_error(work, failure, std::move(state));
}

std::optional<Value> NativeJob::make(BatchServer& server, const PoolWork& work) {
  const auto seeds = wire::EpochSeeds::from_bytes(work.seeds);
  if (!seeds) throw Error(ErrorKind::kValue, "a batch was requested without the seeds of its epoch");
  SlabMemory memory(server.writer());
  std::optional<Value> batch;
  if (reader_.is_iterable()) {
    const auto shard_id = static_cast<uint32_t>(work.lane - 1);
    batch = reader_.read_shard(*seeds, shard_id, lanes_.at(shard_id).start, memory);
  } else {
    std::vector<int64_t> copy;
    batch = reader_.read(*seeds, {.sequence = work.number(), .first_place = work.first_place},
                         integers_of(work.indices, copy), memory);
  }
  if (batch && transform_) {
    const Instant read_at = clock_now();
    *batch = transform_->apply(*batch);
    reader_.clock().note_transform(clock_now() - read_at);
  }
  return batch;
}

// Starts a shard at its start, or where another worker left it. Throws for a shard that did not start here: the batch
// is no longer wanted, and the trainer's message about that is still under way.
void NativeJob::find_lane(const PoolWork& work, uint32_t shard_id) {
  if (work.is_lane_start) {
    LaneStart lane{.tenancy = work.tenancy, .epoch = work.key.epoch};
    if (!work.state.empty()) {
      uint64_t batch_count = 0;
      if (work.state.size() < sizeof batch_count)
        throw Error(ErrorKind::kValue, "the position in a shard cannot be read");
      std::memcpy(&batch_count, work.state.data(), sizeof batch_count);
      lane.start.batch_count = batch_count;
      const auto rest = std::span(work.state).subspan(sizeof batch_count);
      if (!rest.empty()) {
        auto state = dataset::unpack_value(rest);
        if (!state) throw Error(ErrorKind::kValue, state.error().message);
        if (const Value* iterator = state.value().find("iterator")) lane.start.state = *iterator;
        if (const Value* ended = state.value().find("ended")) lane.start.is_at_end = ended->boolean();
      }
    }
    lanes_.insert_or_assign(shard_id, std::move(lane));
    reader_.forget_shard(shard_id);
    return;
  }
  const auto lane = lanes_.find(shard_id);
  if (lane == lanes_.end() || lane->second.tenancy != work.tenancy || lane->second.epoch != work.key.epoch) {
    throw Error(ErrorKind::kValue, "shard " + std::to_string(shard_id) + " of epoch " + std::to_string(work.key.epoch) +
                                       " was not started on this worker");
  }
}

std::vector<std::byte> NativeJob::state_of(uint32_t shard_id) const {
  auto state = reader_.shard_state(shard_id);
  if (!state) return {};
  auto packed =
      dataset::pack_value(Value::dict({{"iterator", *std::move(state)}, {"ended", reader_.has_ended(shard_id)}}));
  if (!packed) throw Error(ErrorKind::kValue, packed.error().message);
  return std::move(packed).value();
}

Result<void> NativeJob::send(BatchServer& server, const PoolWork& work, const Value& batch,
                             std::vector<std::byte> state) {
  const auto nested = dataset::write_value(batch);
  if (!nested) return nested.error();
  worker::BatchContent content{
      .tensors = nested.value().tensors, .boundary_keys = {}, .nest = nested.value().nest.view()};
  server.writer().clock() = reader_.clock();
  return server.answer(work, std::move(content),
                       {.state = std::move(state),
                        .sample_count = reader_.sample_count(),
                        .dataset_size = reader_.is_iterable() ? wire::kNoSize : static_cast<uint64_t>(size_)});
}

}  // namespace penstock::api
