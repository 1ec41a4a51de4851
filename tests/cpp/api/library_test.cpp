// SPDX-License-Identifier: Apache-2.0
// What of the library needs torch's own C++ front end: its datasets and samplers, its archives, scripted modules.
#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

namespace penstock {
namespace {

namespace data = torch::data;

class Rows : public data::datasets::Dataset<Rows> {
 public:
  data::Example<> get(size_t index) override {
    return {torch::full({2}, static_cast<int64_t>(index)), torch::tensor(static_cast<int64_t>(index))};
  }
  torch::optional<size_t> size() const override { return 10; }
};

class Words : public data::datasets::StreamDataset<Words, std::optional<std::vector<data::TensorExample>>> {
 public:
  std::optional<std::vector<data::TensorExample>> get_batch(size_t batch_size) override {
    std::vector<data::TensorExample> examples;
    for (; left_ > 0 && examples.size() < batch_size; --left_) examples.emplace_back(torch::tensor(left_));
    return examples.empty() ? std::nullopt : std::optional(examples);
  }
  std::optional<size_t> size() const override { return std::nullopt; }
  void reset() { left_ = 7; }

 private:
  int64_t left_ = 0;
};

int64_t count_of(DataLoader& loader) {
  int64_t count = 0;
  for (const Batch& batch : loader) count += static_cast<int64_t>(batch.value().size() > 0);
  return count;
}

TEST(TorchData, ADatasetWithItsTransformsIsRead) {
  auto dataset = Rows().map(data::transforms::Lambda<data::Example<>>([](data::Example<> example) {
    return data::Example<>{example.data * 2, example.target};
  }));
  DataLoader loader(from_torch(dataset), {.batch_size = 4, .num_workers = 2});
  auto batch = loader.begin();
  const auto example = batch->as<data::Example<>>();
  EXPECT_TRUE(example.data.select(1, 0).equal(torch::arange(4) * 2));
  EXPECT_TRUE(example.target.equal(torch::arange(4)));
}

TEST(TorchData, ADatasetThatCollatesGivesWholeBatches) {
  DataLoader loader(from_torch(Rows().map(data::transforms::Stack<>())), {.batch_size = 4, .num_workers = 2});
  EXPECT_TRUE(loader.begin()->as<data::Example<>>().target.equal(torch::arange(4)));
  EXPECT_EQ(count_of(loader), 3);
}

TEST(TorchData, AStatefulDatasetIsOneStream) {
  DataLoader loader(from_torch(Words(), 3), {.batch_size = 2, .num_workers = 1, .shards = 1});
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<at::Tensor> parts;
    for (const Batch& batch : loader) parts.push_back(batch.tensor());
    EXPECT_TRUE(torch::cat(parts).equal(torch::arange(7, 0, -1)));
  }
  DataLoader refused(from_torch(Words()), {.num_workers = 2});
  EXPECT_THROW(count_of(refused), Error);
}

TEST(TorchData, ItsSamplersDecide) {
  data::samplers::RandomSampler expected(10);
  auto sampler = from_torch(data::samplers::RandomSampler(10));
  torch::manual_seed(4);
  expected.reset();
  torch::manual_seed(4);
  sampler->begin_epoch(0);
  const auto ours = *sampler->next(10);
  EXPECT_EQ(std::vector<size_t>(ours.begin(), ours.end()), *expected.next(10));
  DataLoader loader(from_torch(Rows()), {.batch_size = 4, .sampler = sampler, .num_workers = 2});
  EXPECT_EQ(count_of(loader), 3);
}

TEST(State, GoesThroughTorchsArchives) {
  DataLoader first(from_torch(Rows()), {.batch_size = 4, .shuffle = true});
  first.begin_epoch();
  first.next();
  torch::serialize::OutputArchive out;
  out.write("weight", torch::ones({2}));
  first.state().save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  State state;
  state.load(in);
  EXPECT_EQ(state.to_json(), first.state().to_json());
  torch::serialize::InputArchive empty;
  EXPECT_THROW(State().load(empty), Error);
}

torch::jit::Module scripted(const std::string& source) {
  torch::jit::Module module("transform");
  module.define(source);
  return module;
}

TEST(Transform, RunsOnEveryBatchWhereItIsMade) {
  const auto module = scripted("def forward(self, data, target):\n    return {'data': data * 2, 'target': target}\n");
  DataLoader loader(from_torch(Rows()), {.batch_size = 4, .num_workers = 2, .transform = module});
  EXPECT_TRUE((*loader.begin())["data"].select(1, 0).equal(torch::arange(4) * 2));
}

TEST(Transform, ThatDrawsInThreadsIsRefused) {
  const auto module = scripted("def forward(self, data, target):\n    return data + torch.rand_like(data.float())\n");
  EXPECT_THROW(DataLoader(from_torch(Rows()), {.num_workers = 1, .transform = module}), Error);
}

TEST(Transform, ThatDoesNotFitTheBatchIsNamed) {
  const auto lost = scripted("def forward(self, data):\n    return data\n");
  DataLoader loader(from_torch(Rows()), {.num_workers = 1, .transform = lost});
  try {
    count_of(loader);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("must take every part of the batch"), std::string::npos);
  }
}

}  // namespace
}  // namespace penstock
