// SPDX-License-Identifier: Apache-2.0
#pragma once
// Datasets that draw, as those of tests/python/cpp_loader.py.

#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <penstock/penstock.h>

#include <chrono>
#include <memory>
#include <thread>
#include <tuple>

class Draw : public penstock::Dataset {
 public:
  explicit Draw(int64_t size, int64_t delay_ms = 0) : size_(size), delay_(delay_ms) {}
  int64_t size() const override { return size_; }
  penstock::Value get(int64_t index, penstock::Draws& draws) override {
    if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    return penstock::to_value(
        std::tuple(index, at::rand({2}, draws.sample_generator()), at::rand({2}, draws.batch_generator())));
  }

 private:
  int64_t size_;
  std::chrono::milliseconds delay_;
};

// Documents of 0 to 44 tokens, all different, with a mask.
class Documents : public penstock::Dataset {
 public:
  explicit Documents(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  penstock::Value get(int64_t index, penstock::Draws&) override {
    const int64_t length = (index * 37 + 11) % 45;
    const at::Tensor tokens = at::arange(index * 100, index * 100 + length, at::kLong);
    return penstock::Value::dict({{"input_ids", tokens}, {"mask", tokens.remainder(3).eq(0)}});
  }

 private:
  int64_t size_;
};

// As the Python tests have it: shard i of n gives i, i + n, ..., each with a number that is drawn.
class DrawStream : public penstock::IterableDataset {
 public:
  explicit DrawStream(int64_t size) : size_(size) {}

  std::unique_ptr<penstock::SampleStream> open(const penstock::Shard& shard, penstock::Draws&) override {
    class Stream : public penstock::SampleStream {
     public:
      Stream(int64_t next, int64_t step, int64_t size) : next_(next), step_(step), size_(size) {}
      std::optional<penstock::Value> next(penstock::Draws& draws) override {
        if (next_ >= size_) return std::nullopt;
        next_ += step_;
        return penstock::to_value(std::pair(next_ - step_, at::rand({2}, draws.batch_generator())));
      }

     private:
      int64_t next_;
      int64_t step_;
      int64_t size_;
    };
    return std::make_unique<Stream>(shard.index, shard.count, size_);
  }

 private:
  int64_t size_;
};
