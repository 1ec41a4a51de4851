// SPDX-License-Identifier: Apache-2.0
#pragma once
// A folder of labelled photographs, as torchvision's ImageFolder reads it: a folder for each class, in sorted order, and
// in each the files in sorted order.

#include <penstock/penstock.h>

#include <filesystem>
#include <string>
#include <vector>

struct Photograph {
  at::Tensor image;  // uint8, 3 x side x side
  int64_t label = 0;
};
PENSTOCK_FIELDS(Photograph, image, label)

// Crops of side x side pixels at random places, half of them mirrored: torchvision's RandomCrop and
// RandomHorizontalFlip, draw by draw.
class Photographs : public penstock::Dataset {
 public:
  Photographs(const std::filesystem::path& folder, int64_t side);

  int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  penstock::Value get(int64_t index, penstock::Draws& draws) override;

 private:
  struct File {
    std::filesystem::path path;
    int64_t label;
  };

  std::vector<File> files_;
  int64_t side_;
};
