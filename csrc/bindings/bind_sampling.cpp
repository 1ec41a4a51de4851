// SPDX-License-Identifier: Apache-2.0
// The order in which samples are read: mixtures of sources, chunks, batches by cost, and packed rows.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "sampling/chunk_order.h"
#include "sampling/cost_packer.h"
#include "sampling/mixture_schedule.h"
#include "sampling/packer.h"
#include "sampling/rank_share.h"
#include "sampling/selection.h"

namespace py = pybind11;

namespace penstock::bindings {

using sampling::ChunkOrder;
using sampling::ChunkOrderOptions;
using sampling::CostPacker;
using sampling::MixtureSchedule;
using sampling::PackedRow;
using sampling::Packer;
using sampling::PackerCounts;
using sampling::PackerOptions;
using sampling::RankShare;
using sampling::RankShareOptions;
using sampling::StepRun;

namespace {

// The batches of one step; a rank converts only its part to Python objects.
struct CostStep {
  std::vector<std::vector<int64_t>> batches;
};

// The packer and the costs that it reads.
struct PythonCostPacker {
  py::array_t<double> costs;
  CostPacker packer;
};

// A row is a list of (document, first, length).
using PlainRow = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<PlainRow> to_plain(const std::vector<PackedRow>& rows) {
  std::vector<PlainRow> plain(rows.size());
  for (size_t row = 0; row < rows.size(); ++row)
    for (const auto& part : rows[row]) plain[row].emplace_back(part.document, part.first, part.length);
  return plain;
}

std::vector<PackedRow> of_plain(const std::vector<PlainRow>& plain) {
  std::vector<PackedRow> rows(plain.size());
  for (size_t row = 0; row < plain.size(); ++row)
    for (const auto& [document, first, length] : plain[row])
      rows[row].push_back({.document = document, .first = first, .length = length});
  return rows;
}

// A run of steps is (first_step, first_sample, step_size).
using PlainRun = std::tuple<uint64_t, uint64_t, uint64_t>;

std::vector<PlainRun> to_plain(const std::vector<StepRun>& runs) {
  std::vector<PlainRun> plain;
  for (const auto& [first_step, first_sample, step_size] : runs)
    plain.emplace_back(first_step, first_sample, step_size);
  return plain;
}

std::vector<StepRun> of_plain(const std::vector<PlainRun>& plain) {
  std::vector<StepRun> runs;
  for (const auto& [first_step, first_sample, step_size] : plain)
    runs.push_back({.first_step = first_step, .first_sample = first_sample, .step_size = step_size});
  return runs;
}

}  // namespace

void bind_sampling(py::module_& module) {
  py::enum_<sampling::Remainder>(module, "Remainder")
      .value("PAD", sampling::Remainder::kPad)
      .value("DROP", sampling::Remainder::kDrop)
      .value("UNEVEN", sampling::Remainder::kUneven);
  py::class_<RankShareOptions>(module, "RankShareOptions")
      .def(py::init([](uint64_t rank, uint64_t rank_count, uint64_t step_size, sampling::Remainder remainder,
                       uint64_t first_step, uint64_t first_sample, const std::vector<PlainRun>& earlier) {
             return RankShareOptions{.rank = rank,
                                     .rank_count = rank_count,
                                     .step_size = step_size,
                                     .remainder = remainder,
                                     .first_step = first_step,
                                     .first_sample = first_sample,
                                     .earlier = of_plain(earlier)};
           }),
           py::kw_only(), py::arg("rank"), py::arg("rank_count"), py::arg("step_size"), py::arg("remainder"),
           py::arg("first_step"), py::arg("first_sample"), py::arg("earlier"));
  py::class_<RankShare>(module, "RankShare")
      .def(py::init<uint64_t, const RankShareOptions&>(), py::arg("sample_count"), py::arg("options"))
      .def_property_readonly("step_count", &RankShare::step_count)
      .def(
          "first_place", [](const RankShare& self, uint64_t step) { return self.part(step).first; }, py::arg("step"))
      .def("samples", &RankShare::samples, py::arg("step"))
      .def(
          "step_samples",
          [](const RankShare& self, uint64_t step) {
            return std::pair(self.order_part(step).first, self.step_samples(step));
          },
          py::arg("step"))
      .def(
          "owned_samples",
          [](const RankShare& self, uint64_t step, const std::vector<uint64_t>& owners) {
            return self.owned_samples(step, owners);
          },
          py::arg("step"), py::arg("owners"))
      .def(
          "order_part",
          [](const RankShare& self, uint64_t step) {
            const auto part = self.order_part(step);
            return std::pair(part.first, part.count);
          },
          py::arg("step"))
      .def(
          "can_divide",
          [](const RankShare& self, uint64_t first, uint64_t count) {
            return self.can_divide({.first = first, .count = count});
          },
          py::arg("first"), py::arg("count"))
      .def("samples_before", &RankShare::samples_before, py::arg("step"))
      .def(
          "runs_of",
          [](const RankShare& self, const std::vector<uint64_t>& steps) { return to_plain(self.runs_of(steps)); },
          py::arg("steps"))
      .def_static(
          "of_step",
          [](uint64_t first, uint64_t count, const RankShareOptions& options) {
            return RankShare::of_step({.first = first, .count = count}, options);
          },
          py::arg("first"), py::arg("count"), py::arg("options"));

  module.def(
      "owners_of",
      [](std::vector<uint64_t> indices, uint64_t dataset_size, uint64_t rank_count) {
        for (uint64_t& index : indices) index = sampling::owner_of(index, dataset_size, rank_count);
        return indices;
      },
      py::arg("indices"), py::arg("dataset_size"), py::arg("rank_count"));

  module.def("samples_evaluated_twice", &sampling::samples_evaluated_twice, py::arg("sample_count"));
  module.def("samples_per_request", &sampling::samples_per_request, py::arg("sample_count"));

  py::class_<MixtureSchedule>(module, "MixtureSchedule")
      .def_property_readonly_static("WHOLE", [](const py::object&) { return MixtureSchedule::kWhole; })
      .def_static(
          "shares_of", [](const std::vector<double>& weights) { return MixtureSchedule::shares_of(weights); },
          py::arg("weights"))
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>>(), py::arg("shares"), py::arg("lags"))
      .def_static(
          "samples_until_end",
          [](const std::vector<int64_t>& shares, const std::vector<int64_t>& lengths) {
            return MixtureSchedule::samples_until_end(shares, lengths);
          },
          py::arg("shares"), py::arg("lengths"))
      .def("next", &MixtureSchedule::next)
      .def_property_readonly("shares", &MixtureSchedule::shares)
      .def_property_readonly("lags", &MixtureSchedule::lags);

  py::class_<ChunkOrder>(module, "ChunkOrder")
      .def_property_readonly_static("SAMPLES_MAX", [](const py::object&) { return ChunkOrder::kSamplesMax; })
      .def_property_readonly_static("RUN_MAX", [](const py::object&) { return ChunkOrder::kRunMax; })
      .def(py::init([](const py::array_t<int64_t, py::array::c_style>& lengths, size_t open_max, size_t reader_count,
                       int64_t run_length, bool shuffle, uint64_t key) {
             return ChunkOrder({lengths.data(), static_cast<size_t>(lengths.size())},
                               ChunkOrderOptions{.open_max = open_max,
                                                 .reader_count = reader_count,
                                                 .run_length = run_length,
                                                 .shuffle = shuffle,
                                                 .key = key});
           }),
           py::arg("lengths"), py::kw_only(), py::arg("open_max"), py::arg("reader_count"), py::arg("run_length"),
           py::arg("shuffle"), py::arg("key"))
      .def(
          "next",
          [](ChunkOrder& self, int64_t count) {
            py::array_t<int64_t> indices(std::min(count, self.left_count()));
            self.next({indices.mutable_data(), static_cast<size_t>(indices.size())});
            return indices;
          },
          py::arg("count"))
      .def("skip", &ChunkOrder::skip, py::arg("count"))
      .def_property_readonly("left_count", &ChunkOrder::left_count);

  py::class_<CostStep>(module, "CostStep")
      .def(
          "batch", [](const CostStep& self, size_t rank) { return self.batches.at(rank); }, py::arg("rank"))
      .def_property_readonly("batch_sizes", [](const CostStep& self) {
        std::vector<size_t> sizes;
        for (const auto& batch : self.batches) sizes.push_back(batch.size());
        return sizes;
      });
  py::class_<PythonCostPacker>(module, "CostPacker")
      .def(py::init([](const py::array_t<double, py::array::c_style>& costs,
                       const py::array_t<int64_t, py::array::c_style>& order) {
             const std::span<const double> values(costs.data(), static_cast<size_t>(costs.size()));
             std::vector<int64_t> indices(order.data(), order.data() + order.size());
             return PythonCostPacker{costs, CostPacker(values, std::move(indices))};
           }),
           py::arg("costs"), py::arg("order"))
      .def(
          "next",
          [](PythonCostPacker& self, double budget, size_t rank_count,
             size_t batch_size_max) -> std::optional<CostStep> {
            CostStep step{
                self.packer.next({.budget = budget, .rank_count = rank_count, .batch_size_max = batch_size_max})};
            return step.batches.empty() ? std::nullopt : std::optional(std::move(step));
          },
          py::arg("budget"), py::arg("rank_count"), py::arg("batch_size_max"))
      .def_property_readonly("left_count", [](const PythonCostPacker& self) { return self.packer.left_count(); });

  py::class_<PackerOptions>(module, "PackerOptions")
      .def(py::init([](int64_t row_length, size_t bins_max, bool splits) {
             return PackerOptions{.row_length = row_length, .bins_max = bins_max, .splits = splits};
           }),
           py::kw_only(), py::arg("row_length"), py::arg("bins_max"), py::arg("splits"));
  py::class_<PackerCounts>(module, "PackerCounts")
      .def(py::init<>())
      .def_readwrite("documents", &PackerCounts::documents)
      .def_readwrite("empty_documents", &PackerCounts::empty_documents)
      .def_readwrite("split_documents", &PackerCounts::split_documents)
      .def_readwrite("dropped_documents", &PackerCounts::dropped_documents)
      .def_readwrite("dropped_tokens", &PackerCounts::dropped_tokens)
      .def_readwrite("rows", &PackerCounts::rows)
      .def_readwrite("row_tokens", &PackerCounts::row_tokens);
  py::class_<Packer>(module, "Packer")
      .def(py::init<const PackerOptions&>(), py::arg("options"))
      .def_static(
          "continuing",
          [](const PackerOptions& options, const std::vector<PlainRow>& bins,
             const PackerCounts& counts) -> std::optional<Packer> {
            std::vector<PackedRow> rows = of_plain(bins);
            if (!Packer::can_continue(options, rows)) return std::nullopt;
            return Packer(options, std::move(rows), counts);
          },
          py::arg("options"), py::arg("bins"), py::arg("counts"))
      .def(
          "add", [](Packer& self, int64_t length) { return to_plain(self.add(length)); }, py::arg("length"))
      .def(
          "add_all",
          [](Packer& self, const py::array_t<int64_t, py::array::c_style>& lengths) {
            self.add_all({lengths.data(), static_cast<size_t>(lengths.size())});
          },
          py::arg("lengths"))
      .def("flush", [](Packer& self) { return to_plain(self.flush()); })
      .def_property_readonly("bins", [](const Packer& self) { return to_plain(self.bins()); })
      .def_property_readonly("counts", [](const Packer& self) { return self.counts(); });
}

}  // namespace penstock::bindings
