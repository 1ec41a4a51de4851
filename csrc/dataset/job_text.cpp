// SPDX-License-Identifier: Apache-2.0
#include "dataset/job_text.h"

#include <cstring>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "penstock/error.h"
#include "penstock/export.h"

namespace penstock::dataset {
namespace {

constexpr uint64_t kHeaderBytesMax = 1 << 20;

std::string own_torch() { return std::to_string(TorchVersion().major) + "." + std::to_string(TorchVersion().minor); }

std::string to_hex(const wire::BlobId& id) {
  std::string text;
  for (const std::byte byte : id) append_hex(text, std::to_integer<uint8_t>(byte));
  return text;
}

std::optional<wire::BlobId> from_hex(std::string_view text) {
  wire::BlobId id{};
  if (text.size() != 2 * id.size()) return std::nullopt;
  for (size_t index = 0; index < id.size(); ++index) {
    const size_t high = kHexDigits.find(text[2 * index]);
    const size_t low = kHexDigits.find(text[2 * index + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos) return std::nullopt;
    id[index] = static_cast<std::byte>(high << 4 | low);
  }
  return id;
}

Fault malformed() {
  return {Errc::kMalformed,
          "a worker cannot read the job that it received; install the same version of penstock on both"};
}

Result<Value> read_header(std::span<const std::byte> blob) {
  uint64_t header_bytes = 0;
  if (blob.size() < sizeof header_bytes) return malformed();
  std::memcpy(&header_bytes, blob.data() + blob.size() - sizeof header_bytes, sizeof header_bytes);
  const uint64_t bytes_before = blob.size() - sizeof header_bytes;
  if (header_bytes > std::min(kHeaderBytesMax, bytes_before)) return malformed();
  const auto header = blob.subspan(bytes_before - header_bytes, header_bytes);
  try {
    return Value::from_json({reinterpret_cast<const char*>(header.data()), header.size()});
  } catch (const Error&) {
    return malformed();
  }
}

Result<void> check_versions(const Value& header, const std::string& begin) {
  const std::string penstock = header["made_with"]["penstock"].text();
  const std::string torch = header["made_with"]["torch"].text();
  if (penstock != PENSTOCK_VERSION) {
    return Fault{Errc::kUnsupported, begin + "the trainer has penstock " + penstock + ", but the worker has " +
                                         PENSTOCK_VERSION + "; install the same version on both"};
  }
  if (torch != own_torch()) {
    return Fault{Errc::kUnsupported, begin + "the trainer has torch " + torch + ", but the worker has " + own_torch() +
                                         "; install the same version on both"};
  }
  return {};
}

Result<JobText> read_parts(const Value& header) {
  JobText job{.name = header["name"].text(),
              .dataset = {},
              .drop_last = header["drop_last"].boolean(),
              .shard_count = header["shard_count"].integer()};
  const std::string begin = "the job '" + job.name + "' cannot run here: ";
  if (auto checked = check_versions(header, begin); !checked) return checked.error();
  const Value& batch_size = header["batch_size"];
  job.batch_size = batch_size.is_none() ? std::nullopt : std::optional(batch_size.integer());
  if ((job.batch_size && *job.batch_size < 1) || job.shard_count < 1) return malformed();
  if (header["kind"].text() == "plugin") {
    job.dataset = PluginDataset{
        .path = header["path"].text(), .name = header["dataset"].text(), .arguments = header["arguments"]};
  } else {
    job.dataset = PythonDataset{.factory = header["factory"].text(), .arguments = header["arguments"]};
  }
  if (!header["transform"].is_none()) {
    job.transform = from_hex(header["transform"].text());
    if (!job.transform) return malformed();
  }
  return job;
}

}  // namespace

std::string write_job(const JobText& job) {
  Value::Entries entries = {{"name", job.name},
                            {"made_with", Value::dict({{"penstock", PENSTOCK_VERSION}, {"torch", own_torch()}})},
                            {"batch_size", job.batch_size ? Value(*job.batch_size) : Value()},
                            {"drop_last", job.drop_last},
                            {"shard_count", job.shard_count},
                            {"transform", job.transform ? Value(to_hex(*job.transform)) : Value()}};
  if (const auto* plugin = std::get_if<PluginDataset>(&job.dataset)) {
    entries.push_back({"kind", "plugin"});
    entries.push_back({"path", plugin->path});
    entries.push_back({"dataset", plugin->name});
    entries.push_back({"arguments", plugin->arguments});
  } else {
    const auto& python = std::get<PythonDataset>(job.dataset);
    entries.push_back({"kind", "factory"});
    entries.push_back({"factory", python.factory});
    entries.push_back({"arguments", python.arguments});
  }
  std::string blob = Value::dict(std::move(entries)).to_json();
  const uint64_t header_bytes = blob.size();
  blob.append(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  return blob;
}

Result<JobText> read_job(std::span<const std::byte> blob) {
  const auto header = read_header(blob);
  if (!header) return header.error();
  const Value* name = header.value().find("name");
  if (name == nullptr || name->kind() != Value::Kind::kText) return malformed();
  if (header.value().find("kind") == nullptr) {
    return Fault{Errc::kUnsupported, "the job '" + name->text() +
                                         "' cannot run here: it belongs to a Python trainer, but this worker runs only "
                                         "plug-ins; start `penstock worker` for it"};
  }
  try {
    return read_parts(header.value());
  } catch (const Error&) {
    return malformed();
  }
}

}  // namespace penstock::dataset
