// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <string>

#include "scripted_training.h"

namespace penstock {
namespace {

// Pre-processing of images, in front of a trained layer.
torch::jit::Module make_model(const std::string& body = "") {
  torch::jit::Module model("model");
  torch::manual_seed(5);
  model.register_buffer("mean", torch::rand({3, 1, 1}));
  model.register_parameter("weight", torch::rand({3 * 16 * 16, 4}).requires_grad_(), false);
  model.register_attribute("p", c10::FloatType::get(), 0.5);
  model.register_attribute("training", c10::BoolType::get(), true);
  model.define(R"(
def forward(self, image, scale: float = 1.0):
    x = image.float() / 255
    x = (x - self.mean) * scale
    x = torch.sin(x) + torch.cos(x) * torch.exp(-x)
)" + body + R"(
    y = torch.mm(x.flatten(1), self.weight)
    return torch.dropout(y, self.p, self.training)
)");
  return model;
}

std::shared_ptr<Dataset> images(bool in_list = false) {
  return make_dataset(256, [in_list](int64_t index, Draws& draws) {
    const at::Tensor image = torch::randint(0, 256, {3, 16, 16}, draws.sample_generator(), at::kByte);
    if (in_list) return Value::list({image, index % 4});
    return Value::dict({{"label", index % 4}, {"image", image}});
  });
}

DataLoader loader_of(int64_t workers) { return DataLoader(images(), {.batch_size = 8, .num_workers = workers}); }

TEST(Offload, TrainsAsTheWholeModuleDoesToTheBit) {
  auto plain_loader = loader_of(2);
  const auto expected = train(make_model(), plain_loader, nullptr, 2);
  auto loader = loader_of(2);
  torch::jit::Module model = make_model();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal, .verify_every = 3});
  EXPECT_EQ(train(model, loader, &offloaded, 2), expected);
  EXPECT_GT(offloaded.used_count(), 40);
  EXPECT_GT(loader.stats().boundary, 40);
  const Plan plan = offloaded.plan();
  EXPECT_FALSE(plan.moved.empty());
  EXPECT_TRUE(plan.refused.empty()) << plan.explain();
  EXPECT_NE(plan.explain().find("worker   "), std::string::npos);
  EXPECT_NE(plan.explain().find("trainer  "), std::string::npos);
}

TEST(Offload, TrainAndEvalHavePlansOfTheirOwn) {
  auto loader = loader_of(2);
  torch::jit::Module model = make_model();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  for (const bool is_training : {true, false, true}) {
    model.train(is_training);
    for (const Batch& batch : loader) {
      const at::NoGradGuard no_grad;
      expect_same_call(model, offloaded, batch);
    }
  }
  EXPECT_GT(offloaded.used_count(), 20);
}

TEST(Offload, TwoModulesOfOneLoaderAreBothCut) {
  auto loader = loader_of(2);
  torch::jit::Module first = make_model();
  torch::jit::Module second("second");
  second.define("def forward(self, image):\n    return torch.cos(image.float() / 3)\n");
  first.eval();
  auto offloaded = offload(first, loader, {.cut = OffloadOptions::Cut::kMaximal});
  {
    auto other = offload(second, loader, {.cut = OffloadOptions::Cut::kMaximal});
    for (const Batch& batch : loader) {
      EXPECT_TRUE(offloaded(batch).toTensor().equal(first.forward({batch["image"]}).toTensor()));
      EXPECT_TRUE(other(batch).toTensor().equal(second.forward({batch["image"]}).toTensor()));
    }
    EXPECT_GT(offloaded.used_count(), 10);
    EXPECT_GT(other.used_count(), 10);
  }
  const uint64_t used_count = offloaded.used_count();
  for (const Batch& batch : loader) static_cast<void>(offloaded(batch));
  EXPECT_GT(offloaded.used_count(), used_count + 20) << "the other one has gone, and not its prefix";
}

TEST(Offload, ABatchInAListGivesArgumentsByTheirPlaces) {
  DataLoader loader(images(true), {.batch_size = 8, .num_workers = 2});
  torch::jit::Module model = make_model();
  model.eval();
  torch::jit::Module narrow("narrow");
  narrow.register_buffer("mean", torch::rand({3, 1, 1}));
  narrow.define("def forward(self, image):\n    return torch.sin(image.float() - self.mean)\n");
  auto offloaded = offload(narrow, loader, {.cut = OffloadOptions::Cut::kMaximal});
  for (int epoch = 0; epoch < 2; ++epoch)
    for (const Batch& batch : loader)
      EXPECT_TRUE(offloaded(batch).toTensor().equal(narrow.forward({batch[0]}).toTensor()));
  EXPECT_GT(offloaded.used_count(), 0);
}

TEST(Offload, AModuleWhoseForwardTakesOtherInputsIsNamed) {
  auto loader = loader_of(1);
  torch::jit::Module module("module");
  module.define("def forward(self, picture):\n    return picture\n");
  auto offloaded = offload(module, loader);
  auto batch = loader.begin();
  try {
    offloaded(*batch);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_NE(std::string(error.what()).find("forward takes 'picture' (Tensor), which the batch does not have"),
              std::string::npos)
        << error.what();
  }
}

TEST(Offload, WithoutWorkersTheWholeModuleRunsAndThePlanSaysWhy) {
  auto loader = loader_of(0);
  torch::jit::Module model = make_model();
  auto offloaded = offload(model, loader);
  EXPECT_TRUE(offloaded(*loader.begin()).isTensor());
  ASSERT_EQ(offloaded.plan().refused.size(), 1);
  EXPECT_NE(offloaded.plan().refused[0].find("num_workers=0"), std::string::npos);
}

TEST(Offload, ABufferThatChangesIsHeeded) {
  auto loader = loader_of(2);
  torch::jit::Module model = make_model();
  model.eval();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : loader) {
      if (epoch == 1 && batch.number() == 16) model.attr("mean").toTensor().add_(0.25);
      EXPECT_TRUE(offloaded(batch).toTensor().equal(model.forward({batch["image"]}).toTensor()));
    }
  }
  EXPECT_GT(offloaded.used_count(), 40);
}

TEST(Offload, DrawsStayWithTheTrainer) {
  auto loader = loader_of(2);
  torch::jit::Module model = make_model("    x = x + torch.rand_like(x)\n");
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const Batch& batch : loader) {
      expect_same_call(model, offloaded, batch);
    }
  }
}

TEST(Offload, ABatchThatTheProgramWritesToRunsThroughTheWholeModule) {
  auto loader = loader_of(2);
  torch::jit::Module model = make_model();
  model.eval();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : loader) {
      const at::Tensor image = batch["image"];
      if (epoch == 1) image.add_(1);
      if (epoch == 2 && batch.number() % 2 == 0) image.set_data(image.flip(0));
      EXPECT_TRUE(offloaded(batch).toTensor().equal(model.forward({image}).toTensor())) << batch.number();
    }
    if (epoch == 0) {
      EXPECT_GT(offloaded.used_count(), 10);
    }
  }
  ASSERT_EQ(offloaded.plan().refused.size(), 1);
  EXPECT_NE(offloaded.plan().refused[0].find("writes to a tensor of the batch"), std::string::npos);
}

TEST(Offload, UnderAutocastTheWholeModuleRuns) {
  auto loader = loader_of(2);
  torch::jit::Module model = make_model("    x = torch.mm(x.flatten(1), x.flatten(1).t())[:, :1] + x.flatten(1)\n");
  model.eval();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const Batch& batch : loader) {
      at::autocast::set_autocast_enabled(at::kCPU, epoch == 1);
      EXPECT_TRUE(offloaded(batch).toTensor().equal(model.forward({batch["image"]}).toTensor())) << batch.number();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
    if (epoch == 0) {
      EXPECT_GT(offloaded.used_count(), 10);
    }
  }
  EXPECT_LT(offloaded.used_count(), 32);
  ASSERT_EQ(offloaded.plan().refused.size(), 1);
  EXPECT_NE(offloaded.plan().refused[0].find("autocast must be off"), std::string::npos);
}

TEST(Offload, AnotherDefaultDtypeIsHeeded) {
  auto loader = loader_of(1);
  torch::jit::Module model = make_model();
  auto offloaded = offload(model, loader, {.cut = OffloadOptions::Cut::kMaximal});
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  offloaded(*loader.begin());
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  ASSERT_EQ(offloaded.plan().refused.size(), 1);
  EXPECT_EQ(offloaded.plan().refused[0], "the default dtype is Double, not Float");
}

TEST(Offload, MayOutliveItsLoader) {
  torch::jit::Module model = make_model();
  std::optional<OffloadedModule> offloaded;
  Batch kept;
  {
    auto loader = loader_of(2);
    offloaded.emplace(offload(model, loader));
    kept = *loader.begin();
    (*offloaded)(kept);
  }
  EXPECT_TRUE((*offloaded)(kept).isTensor());
}

TEST(Offload, AnEmptyPeriodOfComparisonIsRefused) {
  auto loader = loader_of(1);
  EXPECT_THROW(offload(make_model(), loader, {.verify_every = 0}), Error);
}

}  // namespace
}  // namespace penstock
