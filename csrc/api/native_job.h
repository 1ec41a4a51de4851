// SPDX-License-Identifier: Apache-2.0
#pragma once
// A NativeJob is a trainer's job at a native worker: it makes and answers each requested batch, from the dataset of a
// plug-in (make_dataset_of). The counterpart for Python datasets is python/penstock/pool/running_job.py.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "api/module_call.h"
#include "dataset/batch_reader.h"
#include "dataset/job_text.h"
#include "penstock/any_dataset.h"
#include "wire/blob_record.h"
#include "worker/batch_server.h"

namespace penstock::api {

// A job that was opened: its dataset and its transform. Confined to the thread that makes batches.
class NativeJob {
 public:
  using FetchBlob = std::function<Result<std::vector<std::byte>>(const wire::BlobId&)>;

  // Loads the plug-in and creates its dataset. kUnsupported, with a message for the trainer's user, if the job cannot
  // run here; passes on errors of `fetch`.
  static Result<std::unique_ptr<NativeJob>> open(std::span<const std::byte> blob, const FetchBlob& fetch);

  // For `open`.
  NativeJob(dataset::JobText text, const AnyDataset& dataset, std::optional<BatchTransform> transform);

  const std::string& name() const { return text_.name; }

  // Makes the batch, or sends a description of the exception instead. kClosed if this worker shuts down meanwhile.
  Result<void> answer(worker::BatchServer& server, const server::PoolWork& work);

 private:
  Value describe() const;
  std::optional<Value> make(worker::BatchServer& server, const server::PoolWork& work);
  void find_lane(const server::PoolWork& work, uint32_t shard_id);
  std::vector<std::byte> state_of(uint32_t shard_id) const;
  Result<void> send(worker::BatchServer& server, const server::PoolWork& work, const Value& batch,
                    std::vector<std::byte> state);

  const dataset::JobText text_;
  const int64_t size_;  // for a map-style dataset
  dataset::BatchReader reader_;
  std::optional<BatchTransform> transform_;
  // For each lane that started here: the tenancy in which it started, and the position.
  struct LaneStart {
    uint64_t tenancy = 0;
    uint32_t epoch = 0;
    dataset::BatchReader::ShardStart start{};
  };
  std::map<uint32_t, LaneStart> lanes_;
};

// The id of the blob with these bytes: their SHA-256 (PROTOCOL.md, "Blob message").
wire::BlobId blob_id_of(std::span<const std::byte> bytes);

// Loads the library of a plug-in and creates its dataset. The library stays loaded. Throws Error kUnsupported if the
// library cannot be loaded, does not contain the dataset, or was built for another penstock or torch, and kDataset for
// exceptions of the factory.
AnyDataset make_dataset_of(const PluginDataset& plugin);

}  // namespace penstock::api
