// SPDX-License-Identifier: Apache-2.0
// How fast penstock::DataLoader is in a C++ program, against LibTorch's torch::data::make_data_loader with as many
// threads, and for tensors that lie ready against the threads' copies alone. Each measurement is an epoch; the loaders
// take turns (random interleaving), and the table at the end has medians, quartiles and ratios.
//
//   cpp_loader [WORKERS] [--benchmark_repetitions=9]

#include <benchmark/benchmark.h>
#include <penstock/penstock.h>
#include <torch/torch.h>
// jpeglib.h needs these two first.
#include <jpeglib.h>
#include <cstddef>
#include <cstdio>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace data = torch::data;
using Example = data::Example<>;

// ---- Datasets, in torch::data's form; penstock reads the first three through from_torch()

// Tensors that lie in memory: copying is all that there is to do. Each is given several times in an epoch.
class Ready : public data::Dataset<Ready> {
 public:
  explicit Ready(int64_t count) {
    for (int64_t index = 0; index < count / kTimes; ++index)
      images_.push_back(torch::full({3, 224, 224}, double(index)));
    labels_ = torch::arange(count);
  }
  Example get(size_t index) override { return {images_[index % images_.size()], labels_[static_cast<int64_t>(index)]}; }
  std::optional<size_t> size() const override { return images_.size() * kTimes; }
  const std::vector<torch::Tensor>& images() const { return images_; }

 private:
  static constexpr int64_t kTimes = 8;

  std::vector<torch::Tensor> images_;
  torch::Tensor labels_;
};

// Rows of a table.
class Rows : public data::Dataset<Rows> {
 public:
  Rows(int64_t count, int64_t columns) : features_(torch::rand({count, columns})), labels_(torch::arange(count)) {}
  Example get(size_t index) override {
    return {features_[static_cast<int64_t>(index)], labels_[static_cast<int64_t>(index)]};
  }
  std::optional<size_t> size() const override { return features_.size(0); }
  std::vector<torch::Tensor> tensors() const { return {features_, labels_}; }

 private:
  torch::Tensor features_;
  torch::Tensor labels_;
};

// JPEG photographs of 320 x 320, decoded by libjpeg-turbo.
class Photographs : public data::Dataset<Photographs> {
 public:
  explicit Photographs(size_t count) {
    for (size_t index = 0; index < count; ++index) files_.push_back(encode(static_cast<int>(index)));
  }
  Example get(size_t index) override { return {decode(files_[index]), torch::tensor(static_cast<int64_t>(index))}; }
  std::optional<size_t> size() const override { return files_.size(); }

 private:
  static constexpr int kSide = 320;

  static std::string encode(int number) {
    std::vector<unsigned char> pixels(size_t{kSide} * kSide * 3);
    for (size_t place = 0; place < pixels.size(); ++place)
      pixels[place] = static_cast<unsigned char>((place / 7 * (number + 3) + place % 251 * place % 13) % 256);
    jpeg_error_mgr errors;
    jpeg_compress_struct encoder;
    encoder.err = jpeg_std_error(&errors);
    jpeg_create_compress(&encoder);
    unsigned char* memory = nullptr;
    unsigned long bytes = 0;
    jpeg_mem_dest(&encoder, &memory, &bytes);
    encoder.image_width = encoder.image_height = kSide;
    encoder.input_components = 3;
    encoder.in_color_space = JCS_RGB;
    jpeg_set_defaults(&encoder);
    jpeg_set_quality(&encoder, 90, TRUE);
    jpeg_start_compress(&encoder, TRUE);
    while (encoder.next_scanline < kSide) {
      JSAMPROW row = pixels.data() + size_t{encoder.next_scanline} * kSide * 3;
      jpeg_write_scanlines(&encoder, &row, 1);
    }
    jpeg_finish_compress(&encoder);
    std::string file(reinterpret_cast<const char*>(memory), bytes);
    jpeg_destroy_compress(&encoder);
    std::free(memory);
    return file;
  }

  static torch::Tensor decode(const std::string& file) {
    jpeg_error_mgr errors;
    jpeg_decompress_struct decoder;
    decoder.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&decoder);
    jpeg_mem_src(&decoder, reinterpret_cast<const unsigned char*>(file.data()), file.size());
    jpeg_read_header(&decoder, TRUE);
    jpeg_start_decompress(&decoder);
    torch::Tensor pixels = torch::empty({kSide, kSide, 3}, torch::kByte);
    while (decoder.output_scanline < kSide) {
      JSAMPROW row = pixels.data_ptr<uint8_t>() + size_t{decoder.output_scanline} * kSide * 3;
      jpeg_read_scanlines(&decoder, &row, 1);
    }
    jpeg_finish_decompress(&decoder);
    jpeg_destroy_decompress(&decoder);
    return pixels;
  }

  std::vector<std::string> files_;
};

// ---- One epoch

void touch(const torch::Tensor& tensor) { benchmark::DoNotOptimize(tensor.data_ptr()); }

double thread_cpu_s() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void run_penstock(benchmark::State& state, const std::shared_ptr<penstock::Dataset>& dataset, int64_t batch_size,
                  int64_t workers) {
  penstock::DataLoader loader(dataset, {.batch_size = batch_size, .shuffle = true, .num_workers = workers});
  for (const penstock::Batch& batch : loader) touch(batch[0]);  // threads and memory are there from now on
  int64_t batch_count = 0;
  const double begun = thread_cpu_s();
  for (auto _ : state) {
    for (const penstock::Batch& batch : loader) {
      touch(batch[0]);
      ++batch_count;
    }
  }
  state.counters["trainer_us"] = 1e6 * (thread_cpu_s() - begun) / static_cast<double>(batch_count);
  state.SetItemsProcessed(dataset->size() * static_cast<int64_t>(state.iterations()));
}

// The trainer's own cost of a batch that is there: its thread's time in next(), in which the batch before it is let go.
void run_next(benchmark::State& state, const std::shared_ptr<penstock::Dataset>& dataset, int64_t workers) {
  penstock::DataLoader loader(dataset, {.batch_size = 64, .shuffle = true, .num_workers = workers});
  for (const penstock::Batch& batch : loader) touch(batch[0]);
  int64_t batch_count = 0;
  double spent = 0;
  for (auto _ : state) {
    loader.begin_epoch();
    std::optional<penstock::Batch> batch;
    for (int64_t left = *loader.size(); left > 0; --left) {
      while (loader.stats().ready == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      const double begun = thread_cpu_s();
      batch = loader.next();
      spent += thread_cpu_s() - begun;
      touch((*batch)[0]);
      ++batch_count;
    }
    batch.reset();
    loader.next();
  }
  state.counters["trainer_us"] = 1e6 * spent / static_cast<double>(batch_count);
  state.SetItemsProcessed(dataset->size() * static_cast<int64_t>(state.iterations()));
}

template <typename D>
void run_torch(benchmark::State& state, D dataset, int64_t batch_size, int64_t workers) {
  const auto sample_count = static_cast<int64_t>(*dataset.size());
  auto loader = data::make_data_loader(dataset.map(data::transforms::Stack<>()),
                                       data::DataLoaderOptions(batch_size).workers(workers));
  for (auto& batch : *loader) touch(batch.data);
  int64_t batch_count = 0;
  const double begun = thread_cpu_s();
  for (auto _ : state) {
    for (auto& batch : *loader) {
      touch(batch.data);
      ++batch_count;
    }
  }
  state.counters["trainer_us"] = 1e6 * (thread_cpu_s() - begun) / static_cast<double>(batch_count);
  state.SetItemsProcessed(sample_count * static_cast<int64_t>(state.iterations()));
}

// As many threads that do nothing but copy the tensors into batches that are there.
void run_copy(benchmark::State& state, const Ready& dataset, int64_t batch_size, int64_t workers) {
  const auto& images = dataset.images();
  const size_t bytes = images[0].nbytes();
  std::vector<torch::Tensor> targets;
  for (int64_t worker = 0; worker < 3 * workers; ++worker) targets.push_back(torch::ones({batch_size, 3, 224, 224}));
  const auto batch_count = static_cast<int64_t>(*dataset.size()) / batch_size;
  for (auto _ : state) {
    std::vector<std::jthread> threads;
    for (int64_t worker = 0; worker < workers; ++worker) {
      threads.emplace_back([&, worker] {
        for (int64_t batch = worker; batch < batch_count; batch += workers) {
          auto* target = static_cast<char*>(targets[static_cast<size_t>(batch % (3 * workers))].data_ptr());
          for (int64_t place = 0; place < batch_size; ++place) {
            const size_t index = static_cast<size_t>((batch * batch_size + place) * 7919) % images.size();
            std::memcpy(target + static_cast<size_t>(place) * bytes, images[index].data_ptr(), bytes);
          }
        }
      });
    }
  }
  state.SetItemsProcessed(batch_count * batch_size * static_cast<int64_t>(state.iterations()));
}

// ---- The table

class Table : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      const std::string name = run.run_name.function_name;
      rates_[name].push_back(run.counters.at("items_per_second"));
      const auto cost = run.counters.find("trainer_us");
      if (cost != run.counters.end()) costs_[name].push_back(cost->second);
    }
  }
  void Finalize() override {
    std::printf("%-24s %14s %14s %14s %8s %12s\n", "", "samples/s", "quartile", "quartile", "ratio", "trainer us");
    for (auto& [name, rates] : rates_) {
      const std::string other = name.substr(0, name.find('/')) + "/torch";
      const auto against = rates_.find(other);
      // By round: the machine may be slower for a while.
      std::vector<double> ratios;
      for (size_t round = 0; against != rates_.end() && round < std::min(rates.size(), against->second.size()); ++round)
        ratios.push_back(rates[round] / against->second[round]);
      const double ratio = ratios.empty() ? 0 : at(ratios, 0.5);
      const double cost = costs_.contains(name) ? at(costs_[name], 0.5) : 0;
      std::printf("%-24s %14.0f %14.0f %14.0f %8.2f %12.2f\n", name.c_str(), at(rates, 0.5), at(rates, 0.25),
                  at(rates, 0.75), ratio, cost);
    }
  }

 private:
  static double at(std::vector<double> values, double part) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
  }

  std::map<std::string, std::vector<double>> rates_;
  std::map<std::string, std::vector<double>> costs_;
};

template <typename D>
void add(const std::string& name, const D& dataset, std::shared_ptr<penstock::Dataset> ours, int64_t batch_size,
         int64_t workers) {
  benchmark::RegisterBenchmark((name + "/penstock").c_str(), [=](benchmark::State& state) {
    run_penstock(state, ours, batch_size, workers);
  })->UseRealTime();
  benchmark::RegisterBenchmark((name + "/torch").c_str(), [=](benchmark::State& state) {
    run_torch(state, dataset, batch_size, workers);
  })->UseRealTime();
}

}  // namespace

int main(int argument_count, char** arguments) {
  std::vector<char*> given(arguments, arguments + argument_count);
  static char interleaved[] = "--benchmark_enable_random_interleaving=true";
  static char repeated[] = "--benchmark_repetitions=9";
  given.insert(given.begin() + 1, {interleaved, repeated});
  auto count = static_cast<int>(given.size());
  benchmark::Initialize(&count, given.data());
  const int64_t workers = count > 1 ? std::stoll(given[1]) : 2;
  torch::set_num_threads(1);

  const Ready ready(4096);
  add("ready tensors", ready, penstock::from_torch(ready), 64, workers);
  benchmark::RegisterBenchmark("ready tensors/copy", [=](benchmark::State& state) {
    run_copy(state, ready, 64, workers);
  })->UseRealTime();
  benchmark::RegisterBenchmark("ready tensors/next", [=](benchmark::State& state) {
    run_next(state, penstock::from_torch(ready), workers);
  })->UseRealTime();
  const Rows tiny(100'000, 4);
  add("tiny rows", tiny, std::make_shared<penstock::TensorDataset>(tiny.tensors()), 64, workers);
  add("tiny rows, adapted", tiny, penstock::from_torch(tiny), 64, workers);
  const Rows tabular(50'000, 64);
  add("tabular", tabular, penstock::from_torch(tabular), 512, workers);
  const Photographs photographs(256);
  add("photographs", photographs, penstock::from_torch(photographs), 32, workers);

  Table table;
  benchmark::RunSpecifiedBenchmarks(&table);
}
