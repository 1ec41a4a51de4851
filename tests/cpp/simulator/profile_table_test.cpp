// SPDX-License-Identifier: Apache-2.0
#include "simulator/profile_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace penstock::simulator {
namespace {

std::string profile_fault(const std::string& text) {
  auto table = parse_profiles("models.csv", text);
  EXPECT_FALSE(table) << text;
  return table ? "" : table.error().message;
}

TEST(ProfileTable, HasTheModelsWithTheirSpeeds) {
  auto table = parse_profiles(
      "models.csv",
      "# speeds\nmodel,class,iteration_s,batch,cpu1,cpu2\nnet,image,0.5,64,0.5,1\ntext,language,1,2,1,1\n");
  ASSERT_TRUE(table);
  ASSERT_EQ(table.value().profiles.size(), 2U);
  const Profile& net = table.value().profiles[0];
  EXPECT_EQ(net.model, "net");
  EXPECT_EQ(net.model_class, "image");
  EXPECT_EQ(net.iteration_s, 0.5);
  EXPECT_EQ(net.batch, 64);
  EXPECT_EQ(net.sample_bytes, 0);
  EXPECT_EQ(net.speeds, (std::vector<double>{0.5, 1}));
}

TEST(ProfileTable, MayTellTheBytesOfASample) {
  auto table = parse_profiles("m", "model,class,iteration_s,batch,sample_bytes,cpu1\nnet,image,0.5,64,1000,1\n");
  ASSERT_TRUE(table);
  EXPECT_EQ(table.value().profiles[0].bytes_per_s(), 128'000);
}

TEST(ProfileTable, AFaultNamesTheFileTheLineAndBothSides) {
  const std::string header = "model,class,iteration_s,batch,cpu1,cpu2\n";
  EXPECT_EQ(profile_fault(header + "net,picture,1,1,1,1\n"),
            "models.csv, line 2: class is 'picture'; expected image, language, speech or other; correct this line");
  EXPECT_EQ(profile_fault(header + "net,image,1,1,1,0.5\n"),
            "models.csv, line 2: cpu2 is '0.5'; expected a number from 1 to 1000000000; correct this line");
  EXPECT_EQ(profile_fault(header + "net,image,1,1,1\n"),
            "models.csv, line 2: 5 fields; expected 6 as in the first row; correct this line");
  EXPECT_EQ(profile_fault(header),
            "models.csv, line 1: no model follows the first row; expected at least one; correct this "
            "line");
  for (const std::string text : {"", "model,class,iteration_s,batch\n", "model,class,iteration_s,batch,cpu2\n",
                                 "model,class,iteration_s,batch,sample_bytes\n"})
    EXPECT_NE(profile_fault(text).find("models.csv, line 1: "), std::string::npos) << text;
  for (const std::string row : {",image,1,1,1,1", "a,image,0,1,1,1", "a,image,1,-1,1,1", "a,image,1,1,0,1"})
    EXPECT_NE(profile_fault(header + row).find("models.csv, line 2: "), std::string::npos) << row;
}

}  // namespace
}  // namespace penstock::simulator
