// SPDX-License-Identifier: Apache-2.0
// Caches: the policy that knows the order, and samples in memory that processes share.
#include <fcntl.h>
#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/python_nest.h"
#include "bindings/raise.h"
#include "cache/belady_cache.h"
#include "shm/sample_store.h"
#include "worker/stored_sample.h"

namespace py = pybind11;

namespace penstock::bindings {

using cache::BeladyCache;
using shm::SampleStore;
using shm::StoreCount;
using worker::SampleName;
using worker::StorableSample;
using worker::StoredSample;

namespace {

using Keys = py::array_t<int64_t, py::array::c_style>;
using Sizes = py::array_t<uint64_t, py::array::c_style>;

std::span<const int64_t> view_of(const Keys& keys) { return {keys.data(), static_cast<size_t>(keys.size())}; }

Keys to_array(const std::vector<int64_t>& keys) { return Keys(static_cast<py::ssize_t>(keys.size()), keys.data()); }

py::object to_python(const StoredSample& sample, const py::object& loads) {
  return decode_nest(sample.frame.nest, sample.tensors, loads);
}

std::unique_ptr<StorableSample> storable(py::handle sample, const py::object& dumps) {
  EncodedNest encoded = encode_nest(sample, dumps);
  return std::make_unique<StorableSample>(encoded.nest.view(), std::move(encoded.tensors));
}

// Returns `missing` if the sample is not stored.
py::object get(SampleStore& store, const SampleName& name, const py::object& loads, const py::object& missing) {
  const auto sample = without_gil([&]() -> std::optional<StoredSample> {
    const auto found = store.find(name.index);
    if (!found) return std::nullopt;
    auto read = worker::read_sample(name, found->bytes);
    if (!read) {
      store.drop(name.index, *found);
      return std::nullopt;
    }
    store.count(StoreCount::kHit);
    store.count(StoreCount::kHitBytes, found->bytes.size());
    return read;
  });
  return sample ? to_python(*sample, loads) : missing;
}

// Returns whether this call stored the sample.
bool put(SampleStore& store, const SampleName& name, const StorableSample& sample) {
  return without_gil([&] {
    auto claim = store.claim(name.index, sample.bytes());
    if (!claim) return false;
    sample.write(name, claim->memory());
    claim->publish();
    return true;
  });
}

}  // namespace

void bind_cache(py::module_& module) {
  py::class_<BeladyCache>(module, "BeladyCache")
      .def(py::init<uint64_t>(), py::arg("capacity"))
      .def(
          "foresee", [](BeladyCache& self, const Keys& keys) { self.foresee(view_of(keys)); }, py::arg("keys"))
      .def(
          "begin", [](BeladyCache& self, const Keys& keys) { return self.begin(view_of(keys)); }, py::arg("keys"))
      .def(
          "read",
          [](BeladyCache& self, const Keys& keys, const std::optional<Sizes>& sizes) {
            const auto view =
                sizes ? std::span(sizes->data(), static_cast<size_t>(sizes->size())) : std::span<const uint64_t>();
            const auto step = self.read(view_of(keys), view);
            return py::make_tuple(to_array(step.slots_before), to_array(step.slots_after), to_array(step.evicted));
          },
          py::arg("keys"), py::arg("sizes"))
      .def(
          "slots", [](const BeladyCache& self, const Keys& keys) { return to_array(self.slots(view_of(keys))); },
          py::arg("keys"))
      .def_property_readonly("foreseen_count", &BeladyCache::foreseen_count)
      .def_property_readonly("capacity", &BeladyCache::capacity)
      .def_property_readonly("kept_size", &BeladyCache::kept_size)
      .def_property_readonly("kept_count", &BeladyCache::kept_count)
      .def_property_readonly("hit_count", &BeladyCache::hit_count)
      .def_property_readonly("miss_count", &BeladyCache::miss_count);

  py::enum_<StoreCount>(module, "StoreCount")
      .value("HIT", StoreCount::kHit)
      .value("HIT_BYTES", StoreCount::kHitBytes)
      .value("MISS", StoreCount::kMiss)
      .value("DISK_HIT", StoreCount::kDiskHit)
      .value("DISK_HIT_BYTES", StoreCount::kDiskHitBytes)
      .value("DISK_ENTRY", StoreCount::kDiskEntry)
      .value("DISK_ENTRY_BYTES", StoreCount::kDiskEntryBytes)
      .value("DISK_FULL", StoreCount::kDiskFull)
      .value("MADE", StoreCount::kMade)
      .value("COMPARED", StoreCount::kCompared)
      .value("DAMAGED", StoreCount::kDamaged)
      .value("UNCERTAIN", StoreCount::kUncertain)
      .value("RANDOM_WARN", StoreCount::kRandomWarn)
      .value("MEMORY_WARN", StoreCount::kMemoryWarn)
      .value("DISK_WARN", StoreCount::kDiskWarn);
  py::class_<StorableSample>(module, "StorableSample")
      .def(py::init(&storable), py::arg("sample"), py::arg("dumps"))
      .def_property_readonly("bytes", &StorableSample::bytes)
      .def("is_same", &StorableSample::is_same, py::arg("other"))
      .def(
          "to_bytes",
          [](const StorableSample& self, uint64_t index, uint64_t tag) {
            auto made = py::reinterpret_steal<py::bytes>(
                PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(self.bytes())));
            if (!made) throw py::error_already_set();
            std::memset(PyBytes_AS_STRING(made.ptr()), 0, self.bytes());  // the gaps between tensors
            self.write({index, tag}, {reinterpret_cast<std::byte*>(PyBytes_AS_STRING(made.ptr())), self.bytes()});
            return made;
          },
          py::arg("index"), py::arg("tag"));
  module.def(
      "load_sample",
      [](uint64_t index, uint64_t tag, const py::bytes& data, const py::object& loads, const py::object& missing) {
        const auto view = std::as_bytes(std::span(static_cast<std::string_view>(data)));
        const auto sample = without_gil([&] { return worker::read_sample({index, tag}, view); });
        return sample ? to_python(*sample, loads) : missing;
      },
      py::arg("index"), py::arg("tag"), py::arg("data"), py::arg("loads"), py::arg("missing"));
  py::class_<SampleStore, std::shared_ptr<SampleStore>>(module, "SampleStore")
      .def_static(
          "create",
          [](uint64_t sample_count, uint64_t budget_bytes) {
            return unwrap(SampleStore::create({.sample_count = sample_count, .budget_bytes = budget_bytes}));
          },
          py::kw_only(), py::arg("sample_count"), py::arg("budget_bytes"))
      .def_static(
          "attach", [](int fd) { return unwrap(SampleStore::attach(FileDescriptor(fd))); }, py::arg("fd"))
      .def_property_readonly("fd", &SampleStore::fd)
      .def_property_readonly("sample_count", &SampleStore::sample_count)
      .def_property_readonly("budget_bytes", &SampleStore::budget_bytes)
      .def("has_room", &SampleStore::has_room, py::arg("index"))
      .def_property_readonly("is_exhausted", &SampleStore::is_exhausted)
      .def_property_readonly("are_all_barred", &SampleStore::are_all_barred)
      .def(
          "get",
          [](SampleStore& self, uint64_t index, uint64_t tag, const py::object& loads, const py::object& missing) {
            return get(self, {index, tag}, loads, missing);
          },
          py::arg("index"), py::arg("tag"), py::arg("loads"), py::arg("missing"))
      .def(
          "put",
          [](SampleStore& self, uint64_t index, uint64_t tag, const StorableSample& sample) {
            return put(self, {index, tag}, sample);
          },
          py::arg("index"), py::arg("tag"), py::arg("sample"))
      .def("keep_only", &SampleStore::keep_only, py::arg("first"), py::arg("end"))
      .def("keeps", &SampleStore::keeps, py::arg("index"))
      .def("note_missed", &SampleStore::note_missed, py::arg("index"))
      .def("bar", &SampleStore::bar, py::arg("index"))
      .def("is_barred", &SampleStore::is_barred, py::arg("index"))
      .def("bar_all", &SampleStore::bar_all)
      .def("contents",
           [](const SampleStore& self) {
             const auto contents = self.contents();
             return std::tuple(contents.sample_count, contents.bytes, contents.barred_count);
           })
      .def("count", &SampleStore::count, py::arg("kind"), py::arg("number") = 1)
      .def("counted", &SampleStore::counted, py::arg("kind"));
}

}  // namespace penstock::bindings
