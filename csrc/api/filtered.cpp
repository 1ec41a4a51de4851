// SPDX-License-Identifier: Apache-2.0
#include "penstock/filtered.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "api/exceptions.h"
#include "api/loader_state.h"
#include "base/bytes.h"
#include "base/process.h"
#include "graph/sha256.h"
#include "penstock/data_loader.h"
#include "penstock/error.h"
#include "penstock/sampler.h"
#include "sampling/selection.h"

namespace penstock {
namespace {

using Predicate = std::function<bool(const Value&)>;
using Answers = std::vector<bool>;  // by sample

constexpr const char* kFormat = "penstock selection 1";
constexpr size_t kSelectionDigits = 16;

std::string hex_digest(std::span<const std::byte> bytes) {
  graph::Sha256 hash;
  hash.update(bytes);
  std::string text;
  for (const uint8_t byte : hash.finish()) append_hex(text, byte);
  return text;
}

const char* as_text(bool answer) { return answer ? "true" : "false"; }

// Thrown in a worker in place of the predicate's exception.
class PredicateFailure : public Error {
 public:
  explicit PredicateFailure(const std::string& text) : Error(ErrorKind::kValue, text) {}
};

// The predicate's answers for the items of a dataset.
class Verdicts final : public Dataset {
 public:
  Verdicts(std::shared_ptr<Dataset> source, std::shared_ptr<const Predicate> predicate)
      : source_(std::move(source)), predicate_(std::move(predicate)) {}

  int64_t size() const override { return source_->size(); }
  Value get(int64_t index, Draws& draws) override {
    const Value sample = source_->get(index, draws);
    try {
      return (*predicate_)(sample);
    } catch (...) {
      throw PredicateFailure("predicate must return true or false for every sample, but threw " +
                             current_exception_name() + ": " + current_exception_text() + " for sample " +
                             std::to_string(index) + "; handle this sample in the predicate");
    }
  }
  std::shared_ptr<Dataset> clone() const override {
    auto own = source_->clone();
    return own ? std::make_shared<Verdicts>(std::move(own), predicate_) : nullptr;
  }

 private:
  std::shared_ptr<Dataset> source_;             // shared with the program, unless it is a clone
  std::shared_ptr<const Predicate> predicate_;  // shared with clones
};

// The samples of each request: those from `first` on, then the samples to evaluate a second time.
class Requests final : public Sampler {
 public:
  Requests(int64_t first, int64_t sample_count, std::vector<int64_t> again)
      : next_(first), sample_count_(sample_count), again_(std::move(again)) {}

  void begin_epoch(int64_t) override {}
  std::optional<std::vector<int64_t>> next(int64_t) override {
    const auto count = static_cast<size_t>(sampling::samples_per_request(sample_count_));
    std::vector<int64_t> indices;
    while (indices.size() < count && next_ < sample_count_) indices.push_back(next_++);
    if (!indices.empty()) return indices;
    while (indices.size() < count && next_again_ < again_.size()) indices.push_back(again_[next_again_++]);
    return indices.empty() ? std::nullopt : std::optional(std::move(indices));
  }

 private:
  int64_t next_;
  int64_t sample_count_;
  std::vector<int64_t> again_;
  size_t next_again_ = 0;
};

// Evaluates the samples from `first` on, and `again` after these. Returns the answers in this order.
Answers evaluate(const std::shared_ptr<Dataset>& source, const std::shared_ptr<const Predicate>& predicate,
                 int64_t first, const std::vector<int64_t>& again, const FilterOptions& options) {
  const int64_t sample_count = source->size();
  const int64_t total = sample_count - first + static_cast<int64_t>(again.size());
  DataLoader loader(Verdicts(source, predicate), {.sampler = std::make_shared<Requests>(first, sample_count, again),
                                                  .num_workers = options.num_workers,
                                                  .generator = at::detail::createCPUGenerator(0)});
  Answers answers;
  try {
    for (const Batch& batch : loader) {
      const at::Tensor verdicts = batch.tensor();
      const bool* const begin = verdicts.const_data_ptr<bool>();
      answers.insert(answers.end(), begin, begin + verdicts.numel());
      if (options.progress) options.progress(static_cast<int64_t>(answers.size()), total);
    }
  } catch (const Error& error) {
    if (!error.cause()) throw;
    try {
      std::rethrow_exception(error.cause());
    } catch (const PredicateFailure& failure) {
      api::refuse(failure.what());
    } catch (...) {  // of the dataset
    }
    throw;
  }
  return answers;
}

void compare(const Answers& accepted, const Answers& again, const std::vector<int64_t>& samples,
             const std::string& cache) {
  size_t wrong_count = 0;
  std::optional<size_t> wrong;
  for (size_t at = 0; at < samples.size(); ++at) {
    if (accepted[static_cast<size_t>(samples[at])] == again[at]) continue;
    if (!wrong) wrong = at;
    ++wrong_count;
  }
  if (!wrong) return;
  const std::string sample = std::to_string(samples[*wrong]);
  const bool second = again[*wrong];
  if (!cache.empty()) {
    api::refuse("cache must be of the same dataset and predicate, but " + cache + " has " + as_text(!second) +
                " for sample " + sample + " and the predicate returned " + as_text(second) +
                "; delete the file, or name another");
  }
  api::refuse("predicate must give the same answer for the same sample, got " + std::string(as_text(!second)) +
              " and then " + as_text(second) + " for sample " + sample + " (" + std::to_string(wrong_count) + " of " +
              std::to_string(samples.size()) +
              " samples evaluated twice differ); use no random numbers and nothing remembered of other samples, and "
              "filter data before its random augmentation, for example with inputs");
}

// ---- The cache: a line of JSON and one bit per sample, the first one in the highest bit of a byte

std::string to_bits(const Answers& accepted) {
  std::string bits((accepted.size() + 7) / 8, '\0');
  for (size_t at = 0; at < accepted.size(); ++at)
    if (accepted[at]) bits[at / 8] = static_cast<char>(static_cast<uint8_t>(bits[at / 8]) | (0x80U >> (at % 8)));
  return bits;
}

Answers from_bits(const std::string& bits, int64_t sample_count) {
  Answers accepted(static_cast<size_t>(sample_count));
  for (size_t at = 0; at < accepted.size(); ++at)
    accepted[at] = (static_cast<uint8_t>(bits[at / 8]) & (0x80U >> (at % 8))) != 0;
  return accepted;
}

std::string hex_digest(const std::string& text) { return hex_digest(std::as_bytes(std::span(text))); }

// The number of samples that a file's first line has; none if the line or the bits are not as they were written.
std::optional<int64_t> samples_of(const std::string& head, const std::string& bits) {
  try {
    const Value found = Value::from_json(head);
    if (found["format"].text() != kFormat || found["sha256"].text() != hex_digest(bits)) return std::nullopt;
    const int64_t count = found["samples"].integer();
    const bool fits = count >= 0 && static_cast<size_t>(count) <= 8 * bits.size();
    return fits ? std::optional(count) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Returns the answers of a cache file; none if there is no file.
std::optional<Answers> read_cache(const std::string& path, int64_t sample_count) {
  errno = 0;
  const std::ifstream file(path, std::ios::binary);
  if (!file.is_open() && errno == ENOENT) return std::nullopt;
  std::ostringstream content;
  if (file.is_open()) content << file.rdbuf();
  if (!file.is_open() || content.bad()) {
    throw Error(ErrorKind::kFailed, "cache must be a readable file, got " + path + ": " + std::strerror(errno) +
                                        "; correct its permissions, or name another");
  }
  const std::string text = content.str();
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string bits = text.substr(std::min(end + 1, text.size()));
  const auto found = samples_of(text.substr(0, end), bits);
  if (!found) {
    api::refuse(
        "cache must be a file that penstock::filtered() or Python's penstock.filtered() has written, got "
        "another or a damaged one in " +
        path + "; delete it, or name another");
  }
  if (*found != sample_count) {
    api::refuse("cache must be of the same dataset, with " + std::to_string(sample_count) + " samples, got " + path +
                " of " + std::to_string(*found) + " samples; delete it, or name another");
  }
  return from_bits(bits, sample_count);
}

void write_cache(const std::string& path, const Answers& accepted) {
  const std::string bits = to_bits(accepted);
  const Value head = Value::dict({{"format", kFormat},
                                  {"samples", static_cast<int64_t>(accepted.size())},
                                  {"accepted", static_cast<int64_t>(std::ranges::count(accepted, true))},
                                  {"sha256", hex_digest(bits)}});
  const std::string written = path + "." + std::to_string(::getpid());
  std::ofstream file(written, std::ios::binary);
  file << head.to_json() << "\n" << bits;
  file.close();
  std::error_code failure;
  if (file) std::filesystem::rename(written, path, failure);
  if (file && !failure) return;
  const std::string reason = file ? failure.message() : std::strerror(errno);
  std::filesystem::remove(written, failure);
  throw Error(ErrorKind::kFailed, "writing the cache " + path + " failed: " + reason +
                                      "; name a file in a folder that can be written, or leave cache out");
}

}  // namespace

FilteredDataset::FilteredDataset(std::shared_ptr<Dataset> dataset, std::vector<int64_t> indices)
    : dataset_(std::move(dataset)), indices_(std::make_shared<const std::vector<int64_t>>(std::move(indices))) {
  if (!dataset_) api::refuse("dataset must be a Dataset, got null; pass the dataset that the indices are of");
  for (const int64_t index : *indices_) {
    if (index < 0 || index >= dataset_->size()) {
      api::refuse("indices must be from 0 to " + std::to_string(dataset_->size() - 1) +
                  ", the samples of the dataset, "
                  "got " +
                  std::to_string(index) + "; pass indices of its samples");
    }
  }
  selection_ = hex_digest(std::as_bytes(std::span(*indices_))).substr(0, kSelectionDigits);
}

FilteredDataset::FilteredDataset(const FilteredDataset& other, std::shared_ptr<Dataset> dataset)
    : Dataset(other), dataset_(std::move(dataset)), indices_(other.indices_), selection_(other.selection_) {}

FilteredDataset::~FilteredDataset() = default;

Value FilteredDataset::get(int64_t index, Draws& draws) {
  return dataset_->get((*indices_)[static_cast<size_t>(index)], draws);
}

std::optional<Value> FilteredDataset::get_batch(std::span<const int64_t> indices, Draws& draws) {
  std::vector<int64_t> of_dataset;
  of_dataset.reserve(indices.size());
  for (const int64_t index : indices) of_dataset.push_back((*indices_)[static_cast<size_t>(index)]);
  return dataset_->get_batch(of_dataset, draws);
}

std::shared_ptr<Dataset> FilteredDataset::clone() const {
  auto own = dataset_->clone();
  return own ? std::shared_ptr<Dataset>(new FilteredDataset(*this, std::move(own))) : nullptr;
}

std::shared_ptr<FilteredDataset> filtered(std::shared_ptr<Dataset> dataset, std::function<bool(const Value&)> predicate,
                                          FilterOptions options) {
  if (!dataset) api::refuse("dataset must be a Dataset, got null; pass an object of this program");
  if (!predicate) {
    api::refuse(
        "predicate must be callable, got an empty function; pass a function that returns true for the samples "
        "to keep");
  }
  const int64_t sample_count = dataset->size();
  if (sample_count < 1) {
    api::refuse("dataset must have at least one sample, got an empty " + api::title_of(dataset) +
                "; pass a dataset with samples");
  }
  if (options.inputs && options.inputs->size() != sample_count) {
    api::refuse("inputs must have one item for each of the " + std::to_string(sample_count) + " samples, got " +
                std::to_string(options.inputs->size()) + "; pass items in the order of the dataset");
  }
  const std::shared_ptr<Dataset> source = options.inputs ? options.inputs : dataset;
  const auto shared = std::make_shared<const Predicate>(std::move(predicate));
  std::optional<Answers> cached;
  if (!options.cache.empty()) cached = read_cache(options.cache, sample_count);
  const std::vector<int64_t> samples = sampling::samples_evaluated_twice(sample_count);
  const Answers answers = evaluate(source, shared, cached ? sample_count : 0, samples, options);
  const auto end = answers.end() - static_cast<ptrdiff_t>(samples.size());
  const Answers accepted = cached ? *cached : Answers(answers.begin(), end);
  compare(accepted, Answers(end, answers.end()), samples, cached ? options.cache : std::string());
  if (!options.cache.empty() && !cached) write_cache(options.cache, accepted);
  std::vector<int64_t> indices;
  for (int64_t index = 0; index < sample_count; ++index)
    if (accepted[static_cast<size_t>(index)]) indices.push_back(index);
  if (indices.empty()) {
    api::refuse("predicate must accept at least one sample, got none of " + std::to_string(sample_count) +
                "; print its argument and its result");
  }
  return std::make_shared<FilteredDataset>(std::move(dataset), std::move(indices));
}

}  // namespace penstock
