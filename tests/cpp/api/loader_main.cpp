// SPDX-License-Identifier: Apache-2.0
// A loader in C++ for tests in Python: reads its options as JSON from the command line, and says what it gives as JSON
// lines, a batch a line.
//
//   loader_main '{"size": 20, "options": {"batch_size": 4, "shuffle": true}, "seed": 3, "epochs": 2}'
//
// The dataset has three parts: the index, and two numbers that are drawn from the sample's and from the batch's
// generator. "iterable" reads it as a stream; "state" is loaded first; after "stop" batches the state is the last line.
// With "filter", only the samples are read whose index is not divisible by three; it has the options of the filter.
// The option "job" is the rank, the number of ranks and the place of the remainder in its enumeration.
// "transform" is the source of a scripted module's forward, which each batch goes through. "plugin" names a library
// that has the same datasets, "python" a factory, "pool" a controller. "offload" is the source of a module, too: it is
// offloaded and called, its results stand in the place of the batches, and how many of them used a cut is the last
// line. With "read_every" the sum of a batch's second part is added to every such result: of the same batch, or of that
// so many batches before ("late"), read in another thread ("in_thread"). The last line is followed by the bytes that
// stayed with workers, the batches that were recalled, and the sum of the last batch, which is read once the loader is
// gone. With "alarms" signals come while the loader is constructed.
//
// "reshards" lists changes of the number of ranks: each has the number of batches delivered before it, and the new rank
// and number of ranks. The last line is then the state, as with "stop".
//
// "keep" lists batches, by the order of delivery, that are not committed; all others are committed after the last one.
// With "redeliver", only batches of earlier epochs are delivered. With "pack", the options of a packer, the samples are
// documents of draw_datasets.h, and the output has the packed batches, the counts and the state. With "checkpoint", a
// file, the program trains from it to the end, finishes batches in random order with some in flight, and saves the
// loader's state and the batches trained on after each step. It prints "ready" after the first one.

#include <ATen/CPUGeneratorImpl.h>
#include <penstock/penstock.h>
#include <sys/time.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "draw_datasets.h"

namespace {

using penstock::Value;

Value plain(const Value& value) {
  if (value.is_tensor()) {
    const at::Tensor doubles = value.tensor().to(at::kDouble).flatten();
    Value::Items items;
    for (int64_t index = 0; index < doubles.numel(); ++index)
      items.emplace_back(doubles.const_data_ptr<double>()[index]);
    return Value::list(std::move(items));
  }
  if (value.kind() != Value::Kind::kList && value.kind() != Value::Kind::kTuple) return value;
  Value::Items items;
  for (const Value& item : value.items()) items.push_back(plain(item));
  return Value::list(std::move(items));
}

// The samples from the last to the first.
class Backwards : public penstock::Sampler {
 public:
  explicit Backwards(int64_t size) : size_(size), left_(size) {}

  void begin_epoch(int64_t) override { left_ = size_; }
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
    if (left_ == 0) return std::nullopt;
    std::vector<int64_t> indices;
    for (; batch_size > 0 && left_ > 0; --batch_size) indices.push_back(--left_);
    return indices;
  }
  std::optional<int64_t> size() const override { return size_; }

 private:
  int64_t size_;
  int64_t left_;
};

int64_t integer_or(const Value& from, const char* name, int64_t otherwise) {
  const Value* found = from.find(name);
  return found == nullptr || found->is_none() ? otherwise : found->integer();
}

bool boolean_or(const Value& from, const char* name, bool otherwise) {
  const Value* found = from.find(name);
  return found == nullptr ? otherwise : found->boolean();
}

penstock::Options options_of(const Value& given, int64_t size) {
  penstock::Options options{.batch_size = integer_or(given, "batch_size", 1),
                            .shuffle = boolean_or(given, "shuffle", false),
                            .num_workers = integer_or(given, "num_workers", 0),
                            .drop_last = boolean_or(given, "drop_last", false)};
  if (given.find("batch_size") != nullptr && given["batch_size"].is_none()) options.batch_size = std::nullopt;
  if (const Value* seed = given.find("generator"))
    options.generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed->integer()));
  if (const Value* shards = given.find("shards")) options.shards = shards->integer();
  if (const Value* rank = given.find("rank")) {
    options.sampler = std::make_shared<penstock::DistributedSampler>(
        size, penstock::DistributedSampler::Options{.num_replicas = 2, .rank = rank->integer(), .seed = 7});
  }
  if (const Value* job = given.find("job")) {
    options.shard_by_rank = true;
    options.rank = (*job)[0].integer();
    options.world_size = (*job)[1].integer();
    options.remainder = static_cast<penstock::Remainder>((*job)[2].integer());
  }
  if (const Value* timeout = given.find("timeout_s")) options.timeout = std::chrono::seconds(timeout->integer());
  if (const Value* step_size = given.find("global_batch_size")) options.global_batch_size = step_size->integer();
  if (const Value* window = given.find("in_order")) {
    if (window->kind() == Value::Kind::kBoolean)
      options.in_order = window->boolean();
    else
      options.in_order = window->integer();
  }
  if (boolean_or(given, "commit", false)) options.commit = penstock::Commit::kManual;
  if (boolean_or(given, "is_backwards", false)) options.sampler = std::make_shared<Backwards>(size);
  return options;
}

penstock::DataLoader loader_of(const Value& given) {
  const int64_t size = given["size"].integer();
  penstock::Options options = options_of(given["options"], size);
  if (const Value* pool = given.find("pool")) options.pool = pool->text();
  if (const Value* source = given.find("transform")) {
    torch::jit::Module transform("transform");
    transform.define(source->text());
    options.transform = transform;
  }
  const Value* arguments = given.find("arguments");
  if (const Value* plugin = given.find("plugin")) {
    const std::string name = boolean_or(given, "iterable", false) ? "draw_stream" : "draw";
    const Value* named = given.find("dataset");
    return penstock::DataLoader(penstock::PluginDataset{.path = plugin->text(),
                                                        .name = named != nullptr ? named->text() : name,
                                                        .arguments = arguments != nullptr ? *arguments : Value()},
                                options);
  }
  if (const Value* python = given.find("python"))
    return penstock::DataLoader(penstock::PythonDataset{.factory = python->text(), .arguments = *arguments}, options);
  if (boolean_or(given, "iterable", false)) return penstock::DataLoader(DrawStream(size), options);
  if (const Value* filter = given.find("filter")) {
    const Value* cache = filter->find("cache");
    const penstock::FilterOptions filtering{.num_workers = integer_or(*filter, "num_workers", 0),
                                            .cache = cache != nullptr ? cache->text() : ""};
    const auto is_kept = [](const Value& sample) { return sample[0].integer() % 3 != 0; };
    return penstock::DataLoader(penstock::filtered(std::make_shared<Draw>(size), is_kept, filtering), options);
  }
  return penstock::DataLoader(Draw(size), options);
}

std::atomic<int> alarm_count{0};

// SIGALRM every 5 ms, as a profiler has SIGPROF: calls that wait are interrupted.
class Alarms {
 public:
  Alarms() {
    struct sigaction action {};
    action.sa_handler = [](int) { alarm_count.fetch_add(1); };  // and no SA_RESTART
    ::sigaction(SIGALRM, &action, nullptr);
    set(5'000);
  }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;
  ~Alarms() { set(0); }

 private:
  static void set(suseconds_t interval_us) {
    const timeval each{.tv_sec = 0, .tv_usec = interval_us};
    const itimerval timer{.it_interval = each, .it_value = each};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
};

penstock::DataLoader loader_under_alarms(const Value& given) {
  const Alarms alarms;
  penstock::DataLoader loader = loader_of(given);
  if (alarm_count.load() == 0) throw std::runtime_error("no signal came while the loader was constructed");
  return loader;
}

// The result for a batch.
using Call = std::function<Value(const penstock::Batch&)>;

void run_epochs(const Value& given, penstock::DataLoader& loader, const Call& call) {
  const int64_t stop = integer_or(given, "stop", INT64_MAX);
  const Value* reshards = given.find("reshards");
  int64_t count = 0;
  const auto reshard = [&] {
    if (reshards == nullptr) return;
    for (const Value& one : reshards->items())
      if (one[0].integer() == count) loader.reshard(one[1].integer(), one[2].integer());
  };
  for (int64_t epoch = 0; epoch < integer_or(given, "epochs", 1) && count < stop; ++epoch) {
    loader.begin_epoch();
    while (count < stop) {
      const auto batch = loader.next();
      if (!batch) break;
      std::cout << plain(call(*batch)).to_json() << "\n";
      ++count;
      reshard();
    }
  }
}

void run_commits(const Value& given, penstock::DataLoader& loader) {
  std::set<int64_t> kept;
  for (const Value& one : given["keep"].items()) kept.insert(one.integer());
  std::vector<penstock::BatchId> ids;
  if (boolean_or(given, "redeliver", false)) {
    for (const penstock::Batch& batch : loader.redeliver()) {
      std::cout << plain(batch.value()).to_json() << "\n";
      ids.push_back(batch.id());
    }
  } else {
    int64_t left = integer_or(given, "stop", INT64_MAX);
    for (int64_t epoch = 0; epoch < integer_or(given, "epochs", 1) && left > 0; ++epoch) {
      loader.begin_epoch();
      for (; left > 0; --left) {
        const auto batch = loader.next();
        if (!batch) break;
        std::cout << plain(batch->value()).to_json() << "\n";
        ids.push_back(batch->id());
      }
    }
  }
  for (size_t number = 0; number < ids.size(); ++number)
    if (!kept.contains(static_cast<int64_t>(number))) loader.commit(ids[number]);
  Value::Items outstanding;
  for (const penstock::BatchId& id : loader.outstanding()) outstanding.push_back(Value::list({id.epoch, id.batch}));
  std::cout << Value::list(std::move(outstanding)).to_json() << "\n" << loader.state().to_json() << "\n";
}

penstock::PackerOptions packer_options_of(const Value& given) {
  using Options = penstock::PackerOptions;
  Options options{.row_length = given["row_length"].integer(), .open_bins = integer_or(given, "open_bins", 64)};
  if (const Value* padding = given.find("padding")) {
    if (padding->kind() == Value::Kind::kDict) {
      Options::PaddingByName by_name;
      for (const Value::Entry& entry : padding->entries()) by_name.emplace_back(entry.key.text(), entry.value.number());
      options.padding = by_name;
    } else {
      options.padding = padding->number();
    }
  }
  const auto has = [&](const char* name, const char* value) {
    const Value* found = given.find(name);
    return found != nullptr && found->text() == value;
  };
  if (has("policy", "next_fit")) options.policy = Options::Policy::kNextFit;
  if (has("too_long", "split")) options.too_long = Options::TooLong::kSplit;
  if (has("too_long", "drop")) options.too_long = Options::TooLong::kDrop;
  if (has("remainder", "drop")) options.remainder = Options::LastRows::kDrop;
  if (const Value* size = given.find("batch_size")) options.batch_size = size->integer();
  if (const Value* rank = given.find("rank")) {
    options.rank = rank->integer();
    options.world_size = given["world_size"].integer();
  }
  return options;
}

void run_packer(const Value& given) {
  const int64_t size = given["size"].integer();
  penstock::Options options = options_of(given["options"], size);
  if (options.batch_size)
    options.collate_fn = [](std::vector<Value> samples) { return Value::list(std::move(samples)); };
  penstock::DataLoader loader(Documents(size), options);
  const penstock::PackerOptions packing = packer_options_of(given["pack"]);
  const auto open = [&]() -> penstock::Packer::Stream {
    loader.load_state(penstock::State());
    loader.begin_epoch();
    return [&] {
      const auto batch = loader.next();
      return batch ? std::optional(batch->value()) : std::nullopt;
    };
  };
  penstock::Packer packer =
      boolean_or(given, "is_stateless", false) ? penstock::Packer(open, packing) : penstock::Packer(loader, packing);
  if (const Value* state = given.find("state")) packer.load_state(penstock::State::from_json(state->to_json()));
  packer.begin_pass();
  for (int64_t left = integer_or(given, "stop", INT64_MAX); left > 0; --left) {
    const auto batch = packer.next();
    if (!batch) break;
    Value::Items parts;
    for (const auto& [name, stream] : batch->streams) parts.push_back(plain(stream));
    for (const at::Tensor& one : {batch->positions, batch->segment_ids, batch->cu_seqlens}) parts.push_back(plain(one));
    parts.emplace_back(batch->max_seqlen);
    std::cout << Value::list(std::move(parts)).to_json() << "\n";
  }
  const penstock::PackerStats stats = packer.stats();
  std::cout << Value::list({stats.documents, stats.empty_documents, stats.split_documents, stats.dropped_documents,
                            stats.dropped_tokens, stats.rows, stats.tokens, stats.padding_tokens, stats.steps,
                            stats.padding_rows, stats.dropped_rows})
                   .to_json()
            << "\n"
            << packer.state().to_json() << "\n";
}

// A training loop that may be killed at any time.
class Training {
 public:
  Training(const Value& given, penstock::DataLoader& loader)
      : loader_(loader),
        path_(given["checkpoint"].text()),
        epochs_(given["epochs"].integer()),
        random_(static_cast<uint64_t>(given["seed"].integer())) {
    std::ifstream file(path_);
    if (!file) return;
    const Value saved = Value::from_json(std::string(std::istreambuf_iterator<char>(file), {}));
    epoch_ = saved["epoch"].integer();
    trained_ = saved["trained"].items();
    loader_.load_state(penstock::State::from_json(saved["loader"].to_json()));
  }

  void run() {
    if (epoch_ == epochs_) {
      for (const penstock::Batch& batch : loader_.redeliver()) step(batch);
    }
    for (; epoch_ < epochs_; ++epoch_)
      for (const penstock::Batch& batch : loader_) step(batch);
    while (!flying_.empty()) {
      finish_one();
      save();
    }
    save();
  }

 private:
  void step(const penstock::Batch& batch) {
    flying_.push_back(batch);
    for (size_t left = random_() % 12; flying_.size() > left;) finish_one();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    save();
  }
  void finish_one() {
    const auto one = flying_.begin() + static_cast<ptrdiff_t>(random_() % flying_.size());
    trained_.push_back(plain(one->value()));
    loader_.commit(*one);
    flying_.erase(one);
  }
  void save() {
    const std::string temporary = path_ + ".new";
    std::ofstream(temporary) << Value::dict({{"epoch", epoch_},
                                             {"trained", Value::list(trained_)},
                                             {"loader", Value::from_json(loader_.state().to_json())}})
                                    .to_json();
    std::filesystem::rename(temporary, path_);
    if (!std::exchange(is_ready_, true)) std::cout << "\"ready\"" << std::endl;
  }

  penstock::DataLoader& loader_;
  const std::string path_;
  const int64_t epochs_;
  std::mt19937_64 random_;
  int64_t epoch_ = 0;
  Value::Items trained_;
  std::vector<penstock::Batch> flying_;
  bool is_ready_ = false;
};

// Reads the second part of some batches, by one way and then another.
class Reader {
 public:
  explicit Reader(const Value& given)
      : read_every_(integer_or(given, "read_every", 0)),
        late_(static_cast<size_t>(integer_or(given, "late", 0))),
        in_thread_(boolean_or(given, "in_thread", false)) {}

  Value read_with(Value result, const penstock::Batch& batch) {
    kept_.push_back(batch);
    if (kept_.size() > late_ + 1) kept_.pop_front();
    if (kept_.size() <= late_ || ++count_ % read_every_ != 0) return result;
    return Value::list({std::move(result), sum_of(kept_.front())});
  }
  double sum_of_last() { return sum_of(kept_.back()); }

 private:
  double sum_of(const penstock::Batch& batch) {
    const bool is_by_value = ++read_count_ % 2 == 0;
    const auto sum = [&] {
      return (is_by_value ? batch.value()[1].tensor() : batch[1]).to(at::kDouble).sum().item<double>();
    };
    return in_thread_ ? std::async(std::launch::async, sum).get() : sum();
  }

  const int64_t read_every_;
  const size_t late_;
  const bool in_thread_;
  int64_t count_ = 0;
  int64_t read_count_ = 0;
  std::deque<penstock::Batch> kept_;
};

void run(const Value& given) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(static_cast<uint64_t>(given["seed"].integer()));
  if (given.find("pack") != nullptr) return run_packer(given);
  penstock::DataLoader loader = boolean_or(given, "alarms", false) ? loader_under_alarms(given) : loader_of(given);
  if (const Value* state = given.find("state")) loader.load_state(penstock::State::from_json(state->to_json()));
  if (given.find("checkpoint") != nullptr) return Training(given, loader).run();
  if (given.find("keep") != nullptr) return run_commits(given, loader);
  if (const Value* source = given.find("offload")) {
    torch::jit::Module module("module");
    module.define(source->text());
    auto offloaded =
        penstock::offload(module, loader, {.cut = penstock::OffloadOptions::Cut::kMaximal, .verify_every = 3});
    const int64_t read_every = integer_or(given, "read_every", 0);
    Reader reader(given);
    run_epochs(given, loader, [&](const penstock::Batch& batch) {
      Value result(offloaded(batch).toTensor());
      return read_every == 0 ? result : reader.read_with(std::move(result), batch);
    });
    std::cout << offloaded.used_count() << "\n";
    if (read_every > 0) {
      std::cout << loader.stats().withheld_bytes << "\n" << loader.stats().recalled << "\n";
      static_cast<void>(penstock::DataLoader(std::move(loader)));
      std::cout << reader.sum_of_last() << "\n";
    }
    return;
  }
  run_epochs(given, loader, [](const penstock::Batch& batch) { return batch.value(); });
  if (given.find("stop") != nullptr || given.find("reshards") != nullptr) std::cout << loader.state().to_json() << "\n";
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 2) return std::cerr << "usage: loader_main JSON\n", 2;
  try {
    run(Value::from_json(arguments[1]));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
