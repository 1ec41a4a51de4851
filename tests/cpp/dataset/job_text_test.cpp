// SPDX-License-Identifier: Apache-2.0
#include "dataset/job_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock::dataset {
namespace {

wire::BlobId some_id() {
  wire::BlobId id{};
  for (size_t index = 0; index < id.size(); ++index) id[index] = static_cast<std::byte>(7 * index);
  return id;
}

const JobText kPlugin = {.name = "photographs",
                         .dataset = PluginDataset{.path = "lib/photographs.so",
                                                  .name = "photographs",
                                                  .arguments = Value::dict({{"folder", "images"}, {"size", 64}})},
                         .batch_size = 32,
                         .drop_last = true,
                         .shard_count = 3,
                         .transform = some_id()};

Result<JobText> read(std::string_view blob) { return read_job(std::as_bytes(std::span(blob))); }

// A blob with this header.
std::string blob_of(std::string header) {
  const uint64_t bytes = header.size();
  header.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  return header;
}

// The job's blob with one part of its text replaced.
std::string altered(const JobText& job, const std::string& from, const std::string& to) {
  std::string text = write_job(job);
  text.resize(text.size() - sizeof(uint64_t));
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << text;
  return blob_of(text.replace(at, from.size(), to));
}

TEST(JobText, APluginComesBack) {
  const auto read_back = read(write_job(kPlugin));
  ASSERT_TRUE(read_back) << read_back.error().message;
  const JobText& job = read_back.value();
  const auto& plugin = std::get<PluginDataset>(job.dataset);
  EXPECT_EQ(job.name, "photographs");
  EXPECT_EQ(plugin.path, "lib/photographs.so");
  EXPECT_EQ(plugin.arguments["size"].integer(), 64);
  EXPECT_EQ(job.batch_size, 32);
  EXPECT_TRUE(job.drop_last);
  EXPECT_EQ(job.shard_count, 3);
  EXPECT_EQ(job.transform, some_id());
}

TEST(JobText, AFactoryComesBack) {
  const auto read_back = read(write_job({.name = "words",
                                         .dataset = PythonDataset{.factory = "words:read", .arguments = Value()},
                                         .batch_size = std::nullopt}));
  ASSERT_TRUE(read_back) << read_back.error().message;
  EXPECT_EQ(std::get<PythonDataset>(read_back.value().dataset).factory, "words:read");
  EXPECT_EQ(read_back.value().batch_size, std::nullopt);
  EXPECT_EQ(read_back.value().transform, std::nullopt);
}

TEST(JobText, WhatStandsBeforeTheHeaderIsLeftAlone) { EXPECT_TRUE(read("a pickle" + write_job(kPlugin))); }

TEST(JobText, AJobOfAPythonTrainerIsTold) {
  const auto job = read(blob_of(R"({"name": "images", "shard_count": 1})"));
  ASSERT_FALSE(job);
  EXPECT_EQ(job.error().code, Errc::kUnsupported);
  EXPECT_NE(job.error().message.find("start `penstock worker` for it"), std::string::npos);
}

TEST(JobText, AnotherVersionIsTold) {
  const auto penstock = read(altered(kPlugin, PENSTOCK_VERSION, "9.8.7"));
  ASSERT_FALSE(penstock);
  EXPECT_EQ(penstock.error().code, Errc::kUnsupported);
  EXPECT_NE(penstock.error().message.find("the trainer has penstock 9.8.7"), std::string::npos);
  const auto torch = read(altered(kPlugin, "\"torch\":\"", "\"torch\":\"9"));
  ASSERT_FALSE(torch);
  EXPECT_NE(torch.error().message.find("the trainer has torch 9"), std::string::npos);
}

TEST(JobText, WhatIsNoJobIsRefused) {
  const std::string shorter = write_job(kPlugin).substr(0, 7);
  std::string longer = write_job(kPlugin);
  longer.back() = '\x7f';  // its header would be longer than the blob
  for (const std::string& blob :
       {std::string(), shorter, longer, blob_of(""), blob_of("[]"), blob_of("{}"), blob_of("\"text\""),
        blob_of("{\"name\": 1, \"kind\": \"plugin\"}"), blob_of("{\"name\": \"a\", \"kind\": 7}"),
        blob_of(std::string(100'000, '[')), altered(kPlugin, "\"shard_count\":3", "\"shard_count\":0"),
        altered(kPlugin, "\"batch_size\":32", "\"batch_size\":-1"),
        altered(kPlugin, "\"drop_last\":true", "\"drop_last\":1"),
        altered(kPlugin, "\"transform\":\"", "\"transform\":\"00"),
        altered(kPlugin, "\"transform\":\"00", "\"transform\":\"0G"), altered(kPlugin, "\"path\":", "\"other\":"),
        altered(kPlugin, "\"plugin\"", "\"plugins\"")}) {
    const auto job = read(blob);
    ASSERT_FALSE(job) << blob;
    EXPECT_EQ(job.error().code, Errc::kMalformed) << job.error().message;
  }
}

// Neither ends the process nor reads beyond the blob; the sanitizers see it.
TEST(JobText, NoTruncationAndNoChangedByteIsTakenForMoreThanItIs) {
  const std::string blob = write_job(kPlugin);
  for (size_t size = 0; size < blob.size(); ++size) {
    const std::vector<char> exact(blob.begin(), blob.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(read({exact.data(), exact.size()})) << size;
  }
  for (size_t at = 0; at < blob.size(); ++at) {
    for (const char change : {'\x01', '\x02', '\x80', '\x7f'}) {
      std::vector<char> exact(blob.begin(), blob.end());
      exact[at] = static_cast<char>(exact[at] ^ change);
      static_cast<void>(read({exact.data(), exact.size()}));
    }
  }
}

}  // namespace
}  // namespace penstock::dataset
