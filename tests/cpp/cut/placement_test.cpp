// SPDX-License-Identifier: Apache-2.0
// Where the values of a TorchScript program are, that has tensors on a device.

#include "runtime/placement.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "capture/capture.h"
#include "capture/schema.h"
#include "device_main.h"
#include "graph/ir_text.h"

namespace penstock {
namespace {

// By the last part of the operator's name, with a number for the second and later of the same one.
std::map<std::string, graph::Node> placed_nodes(const std::string& body, const at::Tensor& leaf) {
  torch::jit::Module module("module");
  module.register_buffer("there", torch::rand({4}).to(test_device()));
  module.register_attribute("device", c10::DeviceObjType::get(), test_device());
  module.define("\ndef forward(self, x):\n" + body);
  const std::vector<at::Tensor> leaves = {leaf};
  const auto captured = capture::capture_torchscript(module, leaves);
  if (!captured) ADD_FAILURE() << captured.error().message;
  if (!captured) return {};
  const auto placed = runtime::place_on_devices(captured.value().graph, leaves, captured.value().constants);
  EXPECT_TRUE(graph::parse_graph(graph::print_graph(placed.graph))) << graph::print_graph(placed.graph);
  std::map<std::string, graph::Node> nodes;
  for (const graph::Node& node : placed.graph.nodes) {
    std::string name = node.op.substr(node.op.find("::") + 2);
    name = name.substr(0, name.find('.'));
    while (nodes.contains(name)) name += "+";
    nodes.emplace(name, node);
  }
  return nodes;
}

bool is_there(const graph::Node& node) {
  return node.on && node.on->device == capture::device_from_torch(test_device());
}

TEST(Placement, WhatIsBeforeTheCopyIsOnTheCpuAndWhatFollowsIsNot) {
  const auto nodes =
      placed_nodes("    y = (x * 2).to(self.device)\n    return (y + self.there).abs()\n", torch::rand({4}));
  EXPECT_FALSE(nodes.at("mul").on);
  ASSERT_TRUE(nodes.contains("_to_copy"));
  EXPECT_TRUE(is_there(nodes.at("_to_copy")));
  EXPECT_TRUE(nodes.at("_to_copy").on->operands.at(0).is_on_host);
  EXPECT_TRUE(is_there(nodes.at("add")));
  EXPECT_FALSE(nodes.at("add").on->operands.at(0).is_on_host);
  EXPECT_EQ(nodes.at("add").on->operands.at(0).dtype, graph::Dtype::kFloat32);
  EXPECT_TRUE(is_there(nodes.at("abs")));
}

TEST(Placement, ACopyThatConvertsKeepsItsDtype) {
  const auto nodes = placed_nodes("    return x.to(self.device, 6) + self.there\n", torch::arange(4));
  ASSERT_EQ(nodes.at("_to_copy").kwargs.size(), 1);
  EXPECT_EQ(nodes.at("_to_copy").kwargs[0].name, "dtype");
  EXPECT_EQ(nodes.at("add").on->operands.at(0).dtype, graph::Dtype::kFloat32);
}

TEST(Placement, AConversionToWhatItIsStandsForItsArgument) {
  const auto nodes =
      placed_nodes("    return x.to(self.device).float() + self.there\n", torch::rand({4}).to(test_device()));
  EXPECT_TRUE(nodes.contains("alias"));
  EXPECT_FALSE(nodes.contains("_to_copy"));
}

TEST(Placement, AWayBackToTheCpuIsACopyToo) {
  const auto nodes = placed_nodes("    return (x + self.there).cpu() * 2\n", torch::rand({4}).to(test_device()));
  ASSERT_TRUE(nodes.contains("_to_copy"));
  EXPECT_FALSE(nodes.at("_to_copy").on);
  EXPECT_FALSE(nodes.at("mul").on);
}

TEST(Placement, ADtypeThatIsKnownLaterIsNotLost) {
  const auto nodes = placed_nodes("    return x.to(self.device).to(self.there.dtype) + self.there\n", torch::arange(4));
  for (const auto& [name, node] : nodes) {
    if (name.starts_with("alias")) ADD_FAILURE() << "a conversion stands for its argument";
  }
  EXPECT_TRUE(nodes.contains("to"));
}

TEST(Placement, SizesOfTensorsOfTheDeviceAreNumbers) {
  const auto nodes =
      placed_nodes("    y = x + self.there\n    return y.view(y.size(0), 1) * 2\n", torch::rand({4}).to(test_device()));
  for (const auto& [name, node] : nodes)
    EXPECT_EQ(node.on.has_value(), name == "add" || name == "view" || name == "mul");
}

TEST(Placement, WhatIsMadeThereIsThere) {
  const auto nodes = placed_nodes("    return torch.zeros([4], device=self.device) + x.cpu() * 2\n", torch::rand({4}));
  EXPECT_TRUE(is_there(nodes.at("zeros")));
  EXPECT_EQ(nodes.at("add").on->operands.at(0).dtype, graph::Dtype::kFloat32);
}

TEST(Placement, NothingChangesWhereNothingIsOnADevice) {
  torch::jit::Module module("module");
  module.define("\ndef forward(self, x):\n    return x.to(6).cpu() * 2\n");
  const std::vector<at::Tensor> leaves = {torch::rand({4}, at::kDouble)};
  const auto captured = capture::capture_torchscript(module, leaves);
  ASSERT_TRUE(captured) << captured.error().message;
  const auto placed = runtime::place_on_devices(captured.value().graph, leaves, captured.value().constants);
  EXPECT_EQ(graph::print_graph(placed.graph), graph::print_graph(captured.value().graph));
}

}  // namespace
}  // namespace penstock
