// SPDX-License-Identifier: Apache-2.0
// TorchScript modules on a device, offloaded in C++: to the bit what the module does by itself.

#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../api/scripted_training.h"
#include "device_main.h"

namespace penstock {
namespace {

constexpr auto kMaximal = OffloadOptions::Cut::kMaximal;

// `prepare` makes x, floating-point numbers on the device, of image.
torch::jit::Module make_model(const std::string& prepare) {
  torch::jit::Module model("model");
  torch::manual_seed(5);
  model.register_buffer("mean", torch::rand({3, 1, 1}).to(test_device()));
  model.register_parameter("weight", torch::rand({3 * 16 * 16, 4}).to(test_device()).requires_grad_(), false);
  model.register_attribute("device", c10::DeviceObjType::get(), test_device());
  model.define("\ndef forward(self, image):\n" + prepare + R"(
    y = torch.mm(x.flatten(1), self.weight)
    return torch.dropout(y, 0.5, True)
)");
  return model;
}

const std::string kBeforeTheCopy = R"(
    x = torch.flip(image.float() / 255, [-1])
    x = torch.exp(-x)
    x = x.to(self.device)
    x = (x - self.mean) * 2
)";
const std::string kAfterTheCopy = R"(
    x = image.to(self.weight.device).float()
    x = torch.flip(x - self.mean, [-1])
)";
const std::string kOnTheDevice = R"(
    x = image.float() * 0.5
    x = torch.clamp(x - self.mean, 0.0, 100.0)
)";

std::shared_ptr<Dataset> images() {
  return make_dataset(128, [](int64_t index, Draws& draws) {
    const at::Tensor image = torch::randint(0, 256, {3, 16, 16}, draws.sample_generator(), at::kByte);
    return Value::dict({{"label", index % 4}, {"image", image}});
  });
}

DataLoader loader_of(bool has_device) {
  Options options{.batch_size = 8, .num_workers = 2};
  if (has_device) options.device = test_device();
  return DataLoader(images(), options);
}

bool has_moved(const Plan& plan, const std::string& operator_name) {
  return std::ranges::any_of(
      plan.moved, [&](const Plan::Group& group) { return group.label.find(operator_name) != std::string::npos; });
}

void expect_same_training(const std::string& prepare, bool has_device, const std::vector<std::string>& moved) {
  auto plain_loader = loader_of(has_device);
  const auto expected = train(make_model(prepare), plain_loader, nullptr, 3);
  auto loader = loader_of(has_device);
  torch::jit::Module model = make_model(prepare);
  auto offloaded = offload(model, loader, {.cut = kMaximal, .verify_every = 5});
  EXPECT_EQ(train(model, loader, &offloaded, 3), expected);
  const Plan plan = offloaded.plan();
  EXPECT_TRUE(plan.refused.empty()) << plan.explain();
  EXPECT_GT(offloaded.used_count(), 20) << plan.explain();
  for (const std::string& name : moved) EXPECT_TRUE(has_moved(plan, name)) << name << "\n" << plan.explain();
}

TEST(DeviceOffload, CallsBeforeAndAfterACopyMove) {
  expect_same_training(kBeforeTheCopy, /*has_device=*/false, {"aten::flip", "aten::exp", "aten::sub"});
}

TEST(DeviceOffload, CallsThatFollowACopyOfTheBatchMove) {
  expect_same_training(kAfterTheCopy, /*has_device=*/false, {"aten::to", "aten::sub", "aten::flip"});
}

TEST(DeviceOffload, BatchesThatComeOnTheDeviceAreCut) {
  expect_same_training(kOnTheDevice, /*has_device=*/true, {"aten::mul", "aten::sub", "aten::clamp"});
}

TEST(DeviceOffload, ACallWithOtherBitsOnTheDeviceStays) {
  const std::string prepare = "\n    x = torch.log1p(image.float() * 0.5)\n";
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(prepare);
  auto offloaded = offload(model, loader, {.cut = kMaximal});
  train(model, loader, &offloaded, 1);
  const Plan plan = offloaded.plan();
  EXPECT_TRUE(has_moved(plan, "aten::mul")) << plan.explain();
  EXPECT_FALSE(has_moved(plan, "aten::log1p")) << plan.explain();
  EXPECT_NE(plan.explain().find("than on a CPU"), std::string::npos) << plan.explain();
}

TEST(DeviceOffload, BitsThatTurnOutToDifferTakeTheCutBack) {
  if (!give_other_bits({})) GTEST_SKIP() << "a GPU has bits of its own";
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(kOnTheDevice);
  auto offloaded = offload(model, loader, {.cut = kMaximal, .verify_every = 4});
  train(model, loader, &offloaded, 2);
  ASSERT_GT(offloaded.used_count(), 0);
  ASSERT_TRUE(offloaded.plan().refused.empty());
  give_other_bits({"aten::sub", "aten::clamp"});
  train(model, loader, &offloaded, 1);
  give_other_bits({});
  EXPECT_FALSE(offloaded.plan().refused.empty());
}

TEST(DeviceOffload, ABufferOfTheDeviceThatChangesIsHeeded) {
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(kOnTheDevice);
  auto offloaded = offload(model, loader, {.cut = kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : loader) {
      expect_same_call(model, offloaded, batch);
      if (epoch == 1 && batch.number() == 8) model.attr("mean").toTensor().add_(0.25);
    }
  }
  EXPECT_GT(offloaded.used_count(), 0);
}

TEST(DeviceOffload, PlansHaveTheDevicesTimes) {
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(kOnTheDevice);
  auto offloaded = offload(model, loader, {.cut = kMaximal});
  train(model, loader, &offloaded, 1);
  const Plan plan = offloaded.plan();
  ASSERT_FALSE(plan.moved.empty()) << plan.explain();
  double trainer_s = 0;
  for (const Plan::Group& group : plan.moved) {
    trainer_s += group.trainer_s;
    EXPECT_GT(group.worker_s, 0) << group.label;
  }
  EXPECT_GT(trainer_s, 0);
}

TEST(DeviceOffload, PlanningDrawsNoNumber) {
  const std::string noisy = "\n    x = image.float() + torch.rand([3, 1, 1], device=self.device)\n";
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(noisy);
  auto offloaded = offload(model, loader, {.cut = kMaximal});
  const at::NoGradGuard no_grad;
  for (const Batch& batch : loader) {
    expect_same_call(model, offloaded, batch);
  }
}

TEST(DeviceOffload, PlansArePricedAgainWhileTrainingRuns) {
  const std::string dear = R"(
    x = image.float()
    for _ in range(20):
        x = torch.flip(x, [-1]) * 2 - x
)";
  auto plain_loader = loader_of(/*has_device=*/true);
  const auto expected = train(make_model(dear), plain_loader, nullptr, 12);
  auto loader = loader_of(/*has_device=*/true);
  torch::jit::Module model = make_model(dear);
  auto offloaded = offload(model, loader, {.verify_every = 50});
  EXPECT_EQ(train(model, loader, &offloaded, 12), expected) << "with calls that are timed, and other plans";
  EXPECT_TRUE(offloaded.plan().refused.empty()) << offloaded.plan().explain();
}

TEST(DeviceOffload, AModuleThatIsMovedIsPlannedAnew) {
  auto loader = loader_of(/*has_device=*/false);
  torch::jit::Module model = make_model(kBeforeTheCopy);
  auto offloaded = offload(model, loader, {.cut = kMaximal});
  const at::NoGradGuard no_grad;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const Batch& batch : loader) {
      expect_same_call(model, offloaded, batch);
    }
    for (const char* name : {"mean", "weight"}) model.setattr(name, model.attr(name).toTensor().detach().cpu());
    model.setattr("device", c10::Device(at::kCPU));
  }
}

}  // namespace
}  // namespace penstock
