// SPDX-License-Identifier: Apache-2.0
#include "graph/call_flow.h"

#include <gtest/gtest.h>

#include "capture/capture.h"
#include "graph/ir_text.h"

namespace penstock::capture {
namespace {

std::string without(std::string_view statements) {
  auto graph = graph::parse_graph(
      "penstock-ir 1\ninput %x leaf 0 float32 [n, 4]\ninput %k leaf 1 int64 [n]\ninput %n int \"n\" = %x.size(0)\n" +
      std::string(statements));
  EXPECT_TRUE(graph) << graph.error().message;
  annotate(graph.value());
  const std::string text = graph::print_graph(graph::without_repetitions(std::move(graph).value()));
  return text.substr(text.find(".size(0)\n") + 9);
}

void expect_unchanged(std::string_view statements) { EXPECT_EQ(without(statements), statements); }

TEST(Repetitions, ACallThatRepeatsAnotherIsDroppedAndItsReadersReadTheFirst) {
  EXPECT_EQ(without("%a = aten::exp(%x)\n%b = aten::exp(%x) at \"m.py:2\"\n%y = aten::add.Tensor(%a, %b)\noutput %y\n"),
            "%a = aten::exp(%x)\n%y = aten::add.Tensor(%a, %a)\noutput %y\n");
}

TEST(Repetitions, WhatIsComputedOfRepetitionsIsARepetitionToo) {
  EXPECT_EQ(without("%a = aten::exp(%x)\n%b = aten::exp(%x)\n%c = aten::cat([%a, %x], 1)\n%d = aten::cat([%b, %x], 1)\n"
                    "output %d\n"),
            "%a = aten::exp(%x)\n%c = aten::cat([%a, %x], 1)\noutput %c\n");
}

TEST(Repetitions, EveryResultOfARepeatedCallIsFound) {
  EXPECT_EQ(without("%a, %b = aten::max.dim(%x, 1)\n%c, %d = aten::max.dim(%x, 1)\noutput %d\noutput %c\n"),
            "%a, %b = aten::max.dim(%x, 1)\noutput %b\noutput %a\n");
}

TEST(Repetitions, SizesAreComparedToo) {
  EXPECT_EQ(without("%a = size::mul(%n, 2)\n%b = size::mul(%n, 2)\n%y = aten::zeros([%a, %b])\noutput %y\n"),
            "%a = size::mul(%n, 2)\n%y = aten::zeros([%a, %a])\noutput %y\n");
}

TEST(Repetitions, OtherLiteralsValuesOrOperatorsAreOtherCalls) {
  expect_unchanged(
      "%a = aten::add.Scalar(%x, 0.0)\n%b = aten::add.Scalar(%x, -0.0)\n%c = aten::add.Scalar(%x, 0)\n"
      "%d = aten::sub.Scalar(%x, 0.0)\n%e = aten::add.Scalar(%k, 0.0)\n%f = aten::add.Scalar(%x, 0.0, alpha=1)\n"
      "%y = aten::cat([%a, %b, %c, %d, %f, %e])\noutput %y\n");
}

TEST(Repetitions, DrawsAreNotCompared) {
  expect_unchanged("%a = aten::rand_like(%x)\n%b = aten::rand_like(%x)\n%y = aten::sub.Tensor(%a, %b)\noutput %y\n");
}

TEST(Repetitions, AGraphThatWritesIsLeftAlone) {
  expect_unchanged(
      "%a = aten::exp(%x)\n%w = aten::add_.Scalar(%x, 1)\n%b = aten::exp(%x)\n%y = aten::sub.Tensor(%a, %b)\n"
      "output %y\n");
  expect_unchanged("%a = aten::exp(%x)\nopaque::f(%x)\n%b = aten::exp(%x)\n%y = aten::sub.Tensor(%a, %b)\noutput %y\n");
}

TEST(Repetitions, AGraphOfWhichNothingIsKnownIsLeftAlone) {
  auto graph =
      graph::parse_graph("penstock-ir 1\n%a = aten::zeros([2])\n%b = aten::zeros([2])\noutput %a\noutput %b\n");
  EXPECT_EQ(graph::without_repetitions(graph.value()), graph.value());
}

}  // namespace
}  // namespace penstock::capture
