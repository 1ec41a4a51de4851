// SPDX-License-Identifier: Apache-2.0
#include "penstock/packer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <utility>

#include "api/exceptions.h"
#include "api/index_order.h"
#include "api/loader_state.h"
#include "base/bytes.h"
#include "capture/schema.h"
#include "graph/ir.h"
#include "penstock/options.h"
#include "sampling/packer.h"

namespace penstock {

using api::refuse;
using sampling::PackedPart;
using sampling::PackedRow;
using sampling::PackerCounts;

namespace {

using Streams = std::vector<at::Tensor>;

constexpr int64_t kStateVersion = 1;
constexpr const char* kTokens = "tokens";  // the name of the stream of documents that are bare sequences
constexpr std::array<const char*, 4> kMadeNames = {"positions", "segment_ids", "cu_seqlens", "max_seqlen"};

constexpr std::array<std::pair<const char*, int64_t PackerCounts::*>, 7> kCounts = {
    std::pair{"documents", &PackerCounts::documents},
    {"empty_documents", &PackerCounts::empty_documents},
    {"split_documents", &PackerCounts::split_documents},
    {"dropped_documents", &PackerCounts::dropped_documents},
    {"dropped_tokens", &PackerCounts::dropped_tokens},
    {"rows", &PackerCounts::rows},
    {"row_tokens", &PackerCounts::row_tokens}};

int64_t length_of(const Streams& streams) { return streams.front().size(0); }

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

std::string dtype_name(at::ScalarType type) {
  const auto dtype = capture::from_torch<graph::Dtype>(capture::kTorchDtypes, type);
  return dtype ? std::string(graph::name_of(*dtype)) : std::string(c10::toString(type));
}

bool is_number(const Value& value) {
  return value.kind() == Value::Kind::kBoolean || value.kind() == Value::Kind::kInteger ||
         value.kind() == Value::Kind::kNumber;
}

bool is_sequence(const Value& value) {
  return value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple;
}

// The documents of an element: it is one, or a list of them.
std::vector<Value> documents_of(const Value& element) {
  if (is_sequence(element) && element.size() > 0 && !is_number(element[0])) return element.items();
  return {element};
}

// Copies a sequence of numbers into a tensor of one dimension: the memory of a batch is used again.
at::Tensor copied(const Value& values, const std::string& name) {
  if (values.is_tensor()) {
    const at::Tensor& tensor = values.tensor();
    if (tensor.dim() == 1 && tensor.layout() == at::kStrided) {
      if (!tensor.is_cpu()) {
        refuse("stream '" + name + "' of a document must be on the CPU, got " + tensor.device().str() +
               "; move the packed batches instead");
      }
      return tensor.detach().clone();
    }
  } else if (is_sequence(values) && std::ranges::all_of(values.items(), is_number)) {
    const bool are_integers =
        std::ranges::none_of(values.items(), [](const Value& one) { return one.kind() == Value::Kind::kNumber; });
    const auto count = static_cast<int64_t>(values.size());
    at::Tensor tensor = at::empty({count}, are_integers ? at::kLong : at::kDouble);
    for (int64_t index = 0; index < count; ++index) {
      const Value& one = values[static_cast<size_t>(index)];
      const bool is_boolean = one.kind() == Value::Kind::kBoolean;
      if (are_integers)
        tensor.mutable_data_ptr<int64_t>()[index] = is_boolean ? (one.boolean() ? 1 : 0) : one.integer();
      else
        tensor.mutable_data_ptr<double>()[index] = is_boolean ? (one.boolean() ? 1.0 : 0.0) : one.number();
    }
    return are_integers ? tensor : tensor.to(c10::get_default_dtype_as_scalartype());
  }
  std::string got = values.describe();
  if (values.is_tensor()) got = "a tensor of " + std::to_string(values.tensor().dim()) + " dimensions";
  refuse("stream '" + name + "' of a document must be a sequence of numbers in one dimension, got " + got +
         "; give documents one by one, or in lists, as a loader does whose collate_fn returns a list");
}

Value row_value(const PackedRow& row) {
  Value::Items parts;
  for (const PackedPart& part : row) parts.push_back(Value::list({part.document, part.first, part.length}));
  return Value::list(std::move(parts));
}

template <typename Rows>
Value rows_value(const Rows& rows) {
  Value::Items items;
  for (const PackedRow& row : rows) items.push_back(row_value(row));
  return Value::list(std::move(items));
}

std::vector<PackedRow> rows_of(const Value& value) {
  std::vector<PackedRow> rows;
  for (const Value& row : value.items()) {
    PackedRow parts;
    for (const Value& part : row.items())
      parts.push_back({.document = part[0].integer(), .first = part[1].integer(), .length = part[2].integer()});
    rows.push_back(std::move(parts));
  }
  return rows;
}

// A tensor of a state, as text: the form in which Python's packer writes it to JSON.
Value text_of(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return Value::dict({{"dtype", dtype_name(whole.scalar_type())},
                      {"data", to_base64({static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes()})}});
}

at::Tensor tensor_of_text(const Value& value) {
  const std::string& name = value["dtype"].text();
  const auto dtype = graph::name_in<graph::Dtype>(graph::kDtypeNames, name);
  if (!dtype) refuse("'" + name + "' is no dtype");
  const auto bytes = from_base64(value["data"].text());
  const size_t item_bytes = graph::byte_size(*dtype);
  if (!bytes || bytes->size() % item_bytes != 0)
    refuse("the data of a stream must be base64 of whole tokens of " + name);
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(bytes->size() / item_bytes)}, at::TensorOptions(capture::to_torch(*dtype)));
  std::copy(bytes->begin(), bytes->end(), static_cast<std::byte*>(tensor.mutable_data_ptr()));
  return tensor;
}

// A whole number is written as Python's default padding, 0.
Value number_of(double number) {
  const auto whole = static_cast<int64_t>(number);
  return static_cast<double>(whole) == number ? Value(whole) : Value(number);
}

}  // namespace

class PENSTOCK_HIDDEN Packer::Impl {
 public:
  Impl(DataLoader* loader, std::function<Stream()> open, const PackerOptions& options)
      : loader_(loader), open_(std::move(open)), options_(options) {
    check_count("row_length", options_.row_length);
    check_count("open_bins", options_.open_bins);
    if (options_.batch_size) check_count("batch_size", *options_.batch_size);
    const api::JobPlace place = api::place_in_job({.rank = options_.rank, .world_size = options_.world_size});
    rank_ = static_cast<size_t>(place.rank);
    world_size_ = static_cast<size_t>(place.world_size);
    if (const auto* padding = std::get_if<PackerOptions::PaddingByName>(&options_.padding)) {
      std::vector<std::string> names;
      for (const auto& [name, value] : *padding) names.push_back(name);
      set_names(std::move(names));
    }
  }

  void begin_pass() {
    auto restored = std::exchange(restored_, std::nullopt);
    if (!restored) {
      pass_.emplace(Pass{.packer = sampling::Packer(of_packer())});
      pass_->source = open();
    } else {
      pass_.emplace(std::move(restored->begun));
      if (!pass_->is_ended) {
        pass_->source = open();
        if (loader_ == nullptr) skip(pass_->source, pass_->element_count, restored->token_count);
      }
    }
    is_over_ = false;
  }

  std::optional<PackedBatch> next() {
    if (!pass_) refuse("next() was called before begin_pass(); start a pass first");
    if (is_over_) return std::nullopt;
    Pass& current = *pass_;
    const size_t step_rows = this->step_rows();
    while (current.ready.size() < step_rows && !current.is_ended) read(current);
    const size_t missing = step_rows - std::min(step_rows, current.ready.size());
    if (missing > 0 && (current.ready.empty() || options_.remainder == PackerOptions::LastRows::kDrop)) {
      current.dropped_row_count = static_cast<int64_t>(current.ready.size());
      current.ready.clear();
      current.held.clear();
      is_over_ = true;
      return std::nullopt;
    }
    current.padding_row_count += static_cast<int64_t>(missing);
    std::vector<PackedRow> rows(step_rows);
    for (size_t row = 0; row < step_rows - missing; ++row) {
      rows[row] = std::move(current.ready.front());
      current.ready.pop_front();
    }
    std::vector<const PackedRow*> own;
    for (size_t row = rank_; row < step_rows; row += world_size_) own.push_back(&rows[row]);
    PackedBatch batch = make(current, own);
    for (const PackedRow& row : rows) release(current, row);
    ++current.step_count;
    return batch;
  }

  PackerStats stats() const {
    const Pass* current = restored_ ? &restored_->begun : pass_ ? &*pass_ : nullptr;
    return current != nullptr ? stats_of(*current) : PackerStats();
  }

  PackerStats plan(std::span<const int64_t> lengths) const {
    for (size_t number = 0; number < lengths.size(); ++number) {
      if (lengths[number] < 0) refuse("lengths must be numbers of tokens of 0 or more");
      if (lengths[number] > options_.row_length && options_.too_long == PackerOptions::TooLong::kError)
        refuse_length(static_cast<int64_t>(number), lengths[number]);
    }
    Pass planned{.packer = sampling::Packer(of_packer())};
    planned.packer.add_all(lengths);
    planned.packer.flush();
    const auto step_rows = static_cast<int64_t>(this->step_rows());
    const int64_t rest = planned.packer.counts().rows % step_rows;
    planned.step_count = planned.packer.counts().rows / step_rows;
    if (rest > 0 && options_.remainder == PackerOptions::LastRows::kPad) {
      ++planned.step_count;
      planned.padding_row_count = step_rows - rest;
    } else {
      planned.dropped_row_count = rest;
    }
    return stats_of(planned);
  }

  Value state() const {
    const Pass* current = restored_ ? &restored_->begun : pass_ && !is_over_ ? &*pass_ : nullptr;
    return Value::dict({{"version", kStateVersion},
                        {"options", options_value()},
                        {"source", loader_ != nullptr ? StateAccess::value_of(loader_->state()) : Value()},
                        {"pass", current != nullptr ? pass_value(*current) : Value()}});
  }

  void load_state(const Value& state) {
    auto restored = read_state(state);
    const Value& source = state["source"];
    if (loader_ != nullptr && source.is_none()) {
      refuse(
          "the state must contain a state of the documents, because they are a loader's, got none; use the kind of "
          "documents that it was taken with");
    }
    if (loader_ == nullptr && !source.is_none()) {
      refuse(
          "documents must be a DataLoader, because the state contains a state of them, got a function; use the kind of "
          "documents that it was taken with");
    }
    if (loader_ != nullptr) loader_->load_state(StateAccess::make(source));
    pass_.reset();
    is_over_ = true;
    restored_ = std::move(restored);
  }

 private:
  // Tokens of a document that are in rows not delivered yet.
  struct Held {
    int64_t first = 0;   // index of the first token of `streams` in the document
    int64_t needed = 0;  // index of the first token that is in no delivered row
    int64_t length = 0;  // of the document
    Streams streams;

    at::Tensor part(size_t stream, int64_t from, int64_t count) const {
      return streams[stream].narrow(0, from - first, count);
    }
  };

  // One pass over the documents.
  struct Pass {
    sampling::Packer packer;
    Packer::Stream source = {};      // empty if it is over, or not opened yet
    int64_t element_count = 0;       // pulled from the source
    int64_t document_count = 0;      // placed
    int64_t token_count = 0;         // of the documents placed
    std::deque<Value> pending = {};  // documents of the last element
    std::map<int64_t, Held> held = {};
    std::deque<PackedRow> ready = {};
    bool is_ended = false;  // all documents are placed, and the bins are closed
    int64_t step_count = 0;
    int64_t padding_row_count = 0;
    int64_t dropped_row_count = 0;
  };

  struct Restored {
    Pass begun;
    int64_t token_count;  // of the documents that a function returned before the state
  };

  static void check_count(const char* name, int64_t value) {
    if (value < 1) refuse(std::string(name) + " must be >= 1, got " + std::to_string(value));
  }

  int64_t bins_max() const { return options_.policy == PackerOptions::Policy::kBestFit ? options_.open_bins : 1; }
  sampling::PackerOptions of_packer() const {
    return {.row_length = options_.row_length,
            .bins_max = static_cast<size_t>(bins_max()),
            .splits = options_.too_long == PackerOptions::TooLong::kSplit};
  }
  size_t step_rows() const { return static_cast<size_t>(options_.batch_size.value_or(1)) * world_size_; }
  bool has_padding_by_name() const { return std::holds_alternative<PackerOptions::PaddingByName>(options_.padding); }

  Stream open() {
    if (loader_ == nullptr) return open_();
    loader_->begin_epoch();
    return [loader = loader_]() -> std::optional<Value> {
      const auto batch = loader->next();
      return batch ? std::optional(batch->value()) : std::nullopt;
    };
  }

  // Places the next document, or closes the bins if there is none.
  void read(Pass& current) {
    if (current.pending.empty()) {
      const auto element = current.source();
      if (!element) {
        current.source = nullptr;
        current.is_ended = true;
        for (PackedRow& row : current.packer.flush()) current.ready.push_back(std::move(row));
        return check_rows(current.packer.counts());
      }
      ++current.element_count;
      for (Value& document : documents_of(*element)) current.pending.push_back(std::move(document));
      if (current.pending.empty()) return;
    }
    Streams streams = streams_of(current.pending.front());
    const int64_t length = length_of(streams);
    const bool is_too_long = length > options_.row_length;
    if (is_too_long && options_.too_long == PackerOptions::TooLong::kError)
      refuse_length(current.document_count, length);
    current.pending.pop_front();
    current.token_count += length;
    const int64_t number = current.document_count++;
    for (PackedRow& row : current.packer.add(length)) current.ready.push_back(std::move(row));
    if (length > 0 && (!is_too_long || options_.too_long == PackerOptions::TooLong::kSplit))
      current.held.emplace(number, Held{.length = length, .streams = std::move(streams)});
  }

  // Drops the tokens of a delivered row.
  void release(Pass& current, const PackedRow& row) const {
    for (const PackedPart& part : row) {
      const auto found = current.held.find(part.document);
      Held& held = found->second;
      held.needed = part.first + part.length;
      if (held.needed == held.length) {
        current.held.erase(found);
      } else if (held.length - held.needed <= options_.row_length) {
        // The rest may be in an open bin for long.
        for (size_t stream = 0; stream < held.streams.size(); ++stream)
          held.streams[stream] = held.part(stream, held.needed, held.length - held.needed).clone();
        held.first = held.needed;
      }
    }
  }

  PackedBatch make(const Pass& current, const std::vector<const PackedRow*>& rows) const {
    struct Segment {
      int64_t length;
      int32_t id;            // 0: padding
      const Held* document;  // null: padding
      int64_t first;
    };
    std::vector<Segment> segments;
    for (const PackedRow* row : rows) {
      int64_t room = options_.row_length;
      int32_t id = 0;
      for (const PackedPart& part : *row) {
        segments.push_back({part.length, ++id, &current.held.at(part.document), part.first});
        room -= part.length;
      }
      if (room > 0) segments.push_back({room, 0, nullptr, 0});
    }
    const auto row_count = static_cast<int64_t>(rows.size());
    const std::vector<int64_t> shape = options_.batch_size ? std::vector<int64_t>{row_count, options_.row_length}
                                                           : std::vector<int64_t>{options_.row_length};
    PackedBatch batch;
    for (size_t stream = 0; stream < names_.size(); ++stream) {
      const at::Tensor pad = at::full({options_.row_length}, pad_of(names_[stream]), dtypes_[stream]);
      std::vector<at::Tensor> parts;
      parts.reserve(segments.size());
      for (const Segment& one : segments) {
        parts.push_back(one.document != nullptr ? one.document->part(stream, one.first, one.length)
                                                : pad.narrow(0, 0, one.length));
      }
      batch.streams.emplace_back(names_[stream], at::cat(parts).view(shape));
    }
    batch.positions = at::empty({row_count * options_.row_length}, at::kLong);
    batch.segment_ids = at::empty({row_count * options_.row_length}, at::kInt);
    batch.cu_seqlens = at::empty({static_cast<int64_t>(segments.size()) + 1}, at::kInt);
    auto* position = batch.positions.mutable_data_ptr<int64_t>();
    auto* id = batch.segment_ids.mutable_data_ptr<int32_t>();
    auto* start = batch.cu_seqlens.mutable_data_ptr<int32_t>();
    int64_t end = 0;
    *start++ = 0;
    for (const Segment& one : segments) {
      for (int64_t index = 0; index < one.length; ++index) *position++ = index;
      id = std::fill_n(id, one.length, one.id);
      end += one.length;
      *start++ = static_cast<int32_t>(end);
      batch.max_seqlen = std::max(batch.max_seqlen, one.length);
    }
    batch.positions = batch.positions.view(shape);
    batch.segment_ids = batch.segment_ids.view(shape);
    return batch;
  }

  double pad_of(const std::string& name) const {
    if (const auto* value = std::get_if<double>(&options_.padding)) return *value;
    const auto& padding = std::get<PackerOptions::PaddingByName>(options_.padding);
    return std::ranges::find(padding, name, &std::pair<std::string, double>::first)->second;
  }

  void set_names(std::vector<std::string> names) {
    if (names.empty()) refuse("documents must have at least one stream, got an empty dict");
    const auto taken = std::ranges::find_if(
        names, [](const std::string& name) { return std::ranges::find(kMadeNames, name) != kMadeNames.end(); });
    if (taken != names.end()) {
      refuse("streams must not be named " + quoted({kMadeNames.begin(), kMadeNames.end()}) +
             ", which the packer makes, got '" + *taken + "'; rename it, or name the streams to pack in padding");
    }
    names_ = std::move(names);
  }

  Streams streams_of(const Value& document) {
    Streams streams;
    if (document.kind() == Value::Kind::kDict) {
      std::vector<std::string> found;
      for (const Value::Entry& entry : document.entries()) found.push_back(entry.key.text());
      if (names_.empty()) set_names(found);
      for (const std::string& name : names_) {
        const Value* part = document.find(name);
        if (part == nullptr) {
          refuse("every document must have the streams " + quoted(names_) + ", got one with " +
                 (found.empty() ? "none" : quoted(found)));
        }
        streams.push_back(copied(*part, name));
      }
      const auto [least, most] = std::ranges::minmax(streams, {}, [](const at::Tensor& one) { return one.size(0); });
      if (least.size(0) != most.size(0)) {
        std::string shown;
        for (size_t stream = 0; stream < streams.size(); ++stream) {
          shown += (shown.empty() ? "'" : ", '") + names_[stream] + "' " + std::to_string(streams[stream].size(0));
        }
        refuse("the streams of a document must have the same length, got " + shown +
               "; name the streams to pack in padding");
      }
    } else {
      if (names_.empty()) names_ = {kTokens};
      if (names_.size() != 1 || has_padding_by_name()) {
        refuse("every document must be a dict with the streams " + quoted(names_) + ", got " + document.describe());
      }
      streams.push_back(copied(document, names_.front()));
    }
    if (length_of(streams) > 0) check_dtypes(streams);
    return streams;
  }

  void check_dtypes(const Streams& streams) {
    if (dtypes_.empty())
      for (const at::Tensor& one : streams) dtypes_.push_back(one.scalar_type());
    for (size_t stream = 0; stream < streams.size(); ++stream) {
      if (dtypes_[stream] == streams[stream].scalar_type()) continue;
      refuse("stream '" + names_[stream] + "' must have one dtype in all documents, got " +
             dtype_name(streams[stream].scalar_type()) + " after " + dtype_name(dtypes_[stream]) +
             "; convert it in the dataset");
    }
  }

  [[noreturn]] void refuse_length(int64_t number, int64_t length) const {
    refuse("a document must have at most row_length=" + std::to_string(options_.row_length) + " tokens, got " +
           std::to_string(length) + " in document " + std::to_string(number) +
           "; set too_long to kSplit or kDrop, or raise row_length");
  }

  void check_rows(const PackerCounts& counts) const {
    if (counts.rows > 0 || counts.documents == 0) return;
    refuse("at least one document must fit a row, got " + std::to_string(counts.documents) + " documents, of which " +
           std::to_string(counts.dropped_documents) +
           " were longer than row_length=" + std::to_string(options_.row_length) + " and " +
           std::to_string(counts.empty_documents) + " were empty; set too_long to kSplit, or raise row_length");
  }

  // Leaves out the elements read before a state.
  void skip(const Stream& source, int64_t element_count, int64_t token_count) {
    int64_t found_count = 0;
    for (int64_t number = 0; number < element_count; ++number) {
      const auto element = source();
      if (!element) {
        refuse("documents must be as before the state, which has read " + std::to_string(element_count) +
               " elements, got " + std::to_string(number) + "; pass a source that starts at the beginning");
      }
      for (const Value& document : documents_of(*element)) found_count += length_of(streams_of(document));
    }
    if (found_count != token_count) {
      refuse("documents must be as before the state, which has read " + std::to_string(token_count) + " tokens in " +
             std::to_string(element_count) + " elements, got " + std::to_string(found_count) +
             "; pass the same documents in the same order, or a loader");
    }
  }

  PackerStats stats_of(const Pass& current) const {
    const PackerCounts& counts = current.packer.counts();
    return {.documents = counts.documents,
            .empty_documents = counts.empty_documents,
            .split_documents = counts.split_documents,
            .dropped_documents = counts.dropped_documents,
            .dropped_tokens = counts.dropped_tokens,
            .rows = counts.rows,
            .tokens = counts.row_tokens,
            .padding_tokens = counts.rows * options_.row_length - counts.row_tokens,
            .steps = current.step_count,
            .padding_rows = current.padding_row_count,
            .dropped_rows = current.dropped_row_count};
  }

  // ---- States

  Value options_value() const {
    Value padding;
    if (const auto* value = std::get_if<double>(&options_.padding)) {
      padding = number_of(*value);
    } else {
      Value::Entries entries;
      for (const auto& [name, value] : std::get<PackerOptions::PaddingByName>(options_.padding))
        entries.push_back({name, number_of(value)});
      padding = Value::dict(std::move(entries));
    }
    constexpr std::array<const char*, 3> kTooLong = {"error", "split", "drop"};
    return Value::dict({{"row_length", options_.row_length},
                        {"policy", options_.policy == PackerOptions::Policy::kBestFit ? "best_fit" : "next_fit"},
                        {"open_bins", bins_max()},
                        {"too_long", kTooLong[static_cast<size_t>(options_.too_long)]},
                        {"padding", std::move(padding)}});
  }

  Value pass_value(const Pass& current) const {
    // Converting a pending document may determine the streams.
    Impl& self = const_cast<Impl&>(*this);
    std::vector<Streams> kept;
    Value::Items held;
    for (const auto& [number, one] : current.held) {
      Streams rest;
      for (size_t stream = 0; stream < one.streams.size(); ++stream)
        rest.push_back(one.part(stream, one.needed, one.length - one.needed));
      kept.push_back(std::move(rest));
      held.push_back(Value::list({number, one.needed, one.length}));
    }
    Value::Items pending;
    int64_t pending_count = 0;
    for (const Value& document : current.pending) {
      kept.push_back(self.streams_of(document));
      pending.emplace_back(length_of(kept.back()));
      pending_count += length_of(kept.back());
    }
    Value::Entries counts;
    for (const auto& [name, member] : kCounts) counts.push_back({name, current.packer.counts().*member});
    Value::Entries streams;
    for (size_t stream = 0; stream < dtypes_.size(); ++stream) {
      std::vector<at::Tensor> parts = {at::empty({0}, dtypes_[stream])};
      for (const Streams& one : kept)
        if (length_of(one) > 0) parts.push_back(one[stream]);
      streams.push_back({names_[stream], text_of(at::cat(parts))});
    }
    const bool is_restored = restored_ && &current == &restored_->begun;
    return Value::dict({{"elements", current.element_count},
                        {"tokens", is_restored ? restored_->token_count : current.token_count + pending_count},
                        {"placed_tokens", current.token_count},
                        {"is_ended", current.is_ended},
                        {"steps", current.step_count},
                        {"padding_rows", current.padding_row_count},
                        {"counts", Value::dict(std::move(counts))},
                        {"bins", rows_value(current.packer.bins())},
                        {"ready", rows_value(current.ready)},
                        {"held", Value::list(std::move(held))},
                        {"pending", Value::list(std::move(pending))},
                        {"streams", Value::dict(std::move(streams))}});
  }

  std::optional<Restored> read_state(const Value& state) {
    const Value* version = state.kind() == Value::Kind::kDict ? state.find("version") : nullptr;
    const bool is_known = version != nullptr && version->kind() == Value::Kind::kInteger &&
                          version->integer() == kStateVersion && state.find("options") != nullptr &&
                          state.find("pass") != nullptr && state.find("source") != nullptr;
    if (!is_known) {
      refuse("the state must be a result of state() of a Packer, or of Python's state_json(), of version " +
             std::to_string(kStateVersion) + ", got " + state.describe());
    }
    const Value mine = options_value();
    for (const Value::Entry& entry : mine.entries()) {
      const Value* theirs = state["options"].find(entry.key.text());
      if (theirs != nullptr && is_same_option(*theirs, entry.value)) continue;
      refuse(entry.key.text() + " must be the state's, " + (theirs == nullptr ? "nothing" : theirs->to_json()) +
             ", got " + entry.value.to_json() + "; build the packer with the same options");
    }
    const Value& saved = state["pass"];
    if (saved.is_none()) return std::nullopt;
    try {
      return read_pass(saved);
    } catch (const Error& error) {
      refuse(std::string("the state must be a complete result of state(), got one that cannot be read (") +
             error.what() + ")");
    }
  }

  // Paddings of 0 and 0.0 are the same.
  static bool is_same_option(const Value& left, const Value& right) {
    if (left.kind() == Value::Kind::kDict && right.kind() == Value::Kind::kDict) {
      if (left.size() != right.size()) return false;
      return std::ranges::all_of(left.entries(), [&](const Value::Entry& entry) {
        const Value* other = right.find(entry.key.text());
        return other != nullptr && is_same_option(entry.value, *other);
      });
    }
    const auto is_numeric = [](const Value& one) {
      return one.kind() == Value::Kind::kInteger || one.kind() == Value::Kind::kNumber;
    };
    if (is_numeric(left) && is_numeric(right)) return left.number() == right.number();
    return left.to_json() == right.to_json();
  }

  Restored read_pass(const Value& saved) {
    PackerCounts counts;
    for (const auto& [name, member] : kCounts) counts.*member = saved["counts"][name].integer();
    auto bins = rows_of(saved["bins"]);
    auto ready = rows_of(saved["ready"]);
    if (!sampling::Packer::can_continue(of_packer(), bins)) refuse("open bins must have room");
    struct Kept {
      int64_t number = -1;  // of a pending document
      int64_t needed = 0;
      int64_t length = 0;
    };
    std::vector<Kept> kept;
    for (const Value& one : saved["held"].items())
      kept.push_back({one[0].integer(), one[1].integer(), one[2].integer()});
    const size_t held_count = kept.size();
    for (const Value& length : saved["pending"].items()) kept.push_back({.length = length.integer()});
    std::vector<std::string> names;
    std::vector<at::ScalarType> dtypes;
    std::vector<Streams> documents(kept.size());
    for (const Value::Entry& entry : saved["streams"].entries()) {
      const at::Tensor whole = tensor_of_text(entry.value);
      names.push_back(entry.key.text());
      dtypes.push_back(whole.scalar_type());
      int64_t first = 0;
      for (size_t number = 0; number < kept.size(); ++number) {
        const int64_t count = kept[number].length - kept[number].needed;
        if (kept[number].needed < 0 || count < 0 || count > whole.size(0) - first) refuse("tokens are missing");
        documents[number].push_back(whole.narrow(0, first, count).clone());
        first += count;
      }
      if (first != whole.size(0)) refuse("there are tokens of no document");
    }
    if (names.empty() && !kept.empty()) refuse("there are documents without streams");
    Pass begun{.packer = sampling::Packer(of_packer(), bins, counts),
               .element_count = saved["elements"].integer(),
               .document_count = counts.documents,
               .token_count = saved["placed_tokens"].integer(),
               .ready = {ready.begin(), ready.end()},
               .is_ended = saved["is_ended"].boolean(),
               .step_count = saved["steps"].integer(),
               .padding_row_count = saved["padding_rows"].integer()};
    for (size_t number = 0; number < held_count; ++number) {
      const Kept& one = kept[number];
      begun.held.emplace(one.number, Held{.first = one.needed,
                                          .needed = one.needed,
                                          .length = one.length,
                                          .streams = std::move(documents[number])});
    }
    const bool is_bare = names == std::vector<std::string>{kTokens} && !has_padding_by_name();
    for (size_t number = held_count; number < kept.size(); ++number) {
      Value::Entries entries;
      for (size_t stream = 0; stream < names.size(); ++stream)
        entries.push_back({names[stream], documents[number][stream]});
      begun.pending.push_back(is_bare ? entries.front().value : Value::dict(std::move(entries)));
    }
    for (const PackedRow& row : ready) {
      int64_t room = options_.row_length;
      for (const PackedPart& part : row) room = part.length > room ? -1 : room - part.length;
      if (room < 0 || row.empty()) refuse("a row must have at most row_length tokens");
    }
    bins.insert(bins.end(), ready.begin(), ready.end());
    for (const PackedRow& row : bins) {
      for (const PackedPart& part : row) {
        const auto found = begun.held.find(part.document);
        const bool has_tokens = found != begun.held.end() && part.length >= 1 && part.first >= found->second.needed &&
                                part.length <= found->second.length && part.first <= found->second.length - part.length;
        if (!has_tokens) refuse("the tokens of all rows must be there");
      }
    }
    if (!names.empty()) {
      set_names(std::move(names));
      dtypes_ = std::move(dtypes);
    }
    return {.begun = std::move(begun), .token_count = saved["tokens"].integer()};
  }

  DataLoader* loader_;  // null: open_ is the source
  std::function<Stream()> open_;
  const PackerOptions options_;
  size_t rank_ = 0;
  size_t world_size_ = 1;
  std::vector<std::string> names_;      // empty until the first document, if that determines them
  std::vector<at::ScalarType> dtypes_;  // empty until the first token
  std::optional<Pass> pass_;            // the current one, or the last one if it is over
  bool is_over_ = true;
  std::optional<Restored> restored_;
};

const at::Tensor& PackedBatch::operator[](std::string_view name) const {
  for (const auto& [of, stream] : streams)
    if (of == name) return stream;
  std::vector<std::string> names;
  for (const auto& [of, stream] : streams) names.push_back(of);
  refuse("the batch has no stream '" + std::string(name) + "', only " + quoted(names));
}

Packer::Packer(DataLoader& loader, const PackerOptions& options)
    : impl_(std::make_unique<Impl>(&loader, nullptr, options)) {}
Packer::Packer(std::function<Stream()> open, const PackerOptions& options)
    : impl_(std::make_unique<Impl>(nullptr, std::move(open), options)) {}
Packer::~Packer() = default;
Packer::Packer(Packer&&) noexcept = default;
Packer& Packer::operator=(Packer&&) noexcept = default;

Packer::Iterator& Packer::Iterator::operator++() {
  batch_ = packer_->next();
  return *this;
}

Packer::Iterator Packer::begin() {
  begin_pass();
  Iterator iterator(*this);
  ++iterator;
  return iterator;
}
void Packer::begin_pass() { impl_->begin_pass(); }
std::optional<PackedBatch> Packer::next() { return impl_->next(); }
PackerStats Packer::stats() const { return impl_->stats(); }
PackerStats Packer::plan(std::span<const int64_t> lengths) const { return impl_->plan(lengths); }
State Packer::state() const { return StateAccess::make(impl_->state()); }
void Packer::load_state(const State& state) { impl_->load_state(StateAccess::value_of(state)); }

}  // namespace penstock
