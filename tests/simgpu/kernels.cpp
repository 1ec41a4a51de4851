// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "device.h"
#include "memory.h"
#include "streams.h"

namespace simgpu {
namespace {

struct Notes {
  std::mutex mutex;
  Counts counts;
  std::set<std::string> altered;
  bool is_recording = false;
  std::vector<std::string> recorded;
};

Notes& notes() {
  static auto* const all = std::make_unique<Notes>().release();
  return *all;
}

c10::Stream current_stream(const at::Tensor& tensor) { return Streams::get().current(tensor.device().index()); }

at::Tensor make_empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype));
}

// CPU tensors on the bytes of the device's, for one call. Tensors that share a storage have aliases that do so too.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    TORCH_CHECK(!device_ || *device_ == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                tensor.device(), "!");
    device_ = tensor.device();
    const auto& storage = tensor.storage();
    auto& shared = storages_[storage.unsafeGetStorageImpl()];
    if (!shared.alias) {
      shared = {storage, c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                      c10::DataPtr(on_host(storage.data()), c10::kCPU), c10::GetAllocator(c10::kCPU),
                                      /*resizable=*/true)};
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(shared.alias),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (tensor.is_complex()) alias._set_conj(tensor.is_conj());
    if (tensor.is_neg()) alias._set_neg(true);
    aliased_.push_back({tensor, alias});
    return alias;
  }

  const std::optional<c10::Device>& device() const { return device_; }

  // The device's tensor for one that a kernel gave back: an argument, a view of one, or else a copy.
  at::Tensor on_device(const at::Tensor& result, c10::Device device) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [tensor, alias] : aliased_) {
      if (alias.is_same(result)) return tensor;
    }
    for (const auto& [key, shared] : storages_) {
      if (shared.alias.unsafeGetStorageImpl() != result.storage().unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(shared.storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      if (result.is_complex()) view._set_conj(result.is_conj());
      if (result.is_neg()) view._set_neg(true);
      return view;
    }
    at::Tensor copy = make_empty(result.sizes(), result.strides(), result.scalar_type(), device);
    if (result.numel() > 0) Aliases().of(copy).copy_(result);
    return copy;
  }

  // Arguments that a kernel has resized.
  void take_over_sizes() {
    for (auto& [key, shared] : storages_) {
      auto* const alias = shared.alias.unsafeGetStorageImpl();
      auto* const storage = shared.storage.unsafeGetStorageImpl();
      if (alias->nbytes() <= storage->nbytes()) continue;
      c10::DataPtr data = allocate(storage->device().index(), alias->nbytes());
      std::memcpy(on_host(data.get()), alias->data(), alias->nbytes());
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(alias->nbytes());
    }
    for (const auto& [tensor, alias] : aliased_) {
      if (tensor.sizes() == alias.sizes() && tensor.strides() == alias.strides()) continue;
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  // Whether a result is, or lies on, an argument.
  bool has(const at::Tensor& result) const {
    return std::any_of(storages_.begin(), storages_.end(), [&](const auto& entry) {
      return entry.second.alias.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl();
    });
  }

 private:
  struct Shared {
    c10::Storage storage;
    c10::Storage alias;
  };
  struct Aliased {
    at::Tensor tensor;
    at::Tensor alias;
  };

  std::optional<c10::Device> device_;
  std::map<const c10::StorageImpl*, Shared> storages_;
  std::vector<Aliased> aliased_;
};

// Calls `change` for each tensor of a value and puts what it returns in its place.
template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

// Flips the last bit of every third number. The same numbers get the same bits.
void alter(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.is_floating_point()) return;
  at::Tensor altered = tensor.contiguous();
  auto* const bytes = static_cast<std::byte*>(altered.mutable_data_ptr());
  const auto size = static_cast<int64_t>(altered.element_size());
  for (int64_t place = 0; place < altered.numel(); place += 3) bytes[place * size] ^= std::byte{1};
  if (!altered.is_same(tensor)) tensor.copy_(altered);
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool may_mix_hosts(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index", "aten::index_put_",    "aten::_index_put_impl_", "aten::_pack_padded_sequence",
      "aten::set_",  "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

bool is_of_kind(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.type();
  if (type->kind() == kind) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == kind;
}

// While it lives, the CPU's default generator draws as the device's does.
class DrawsOfDevice {
 public:
  explicit DrawsOfDevice(c10::DeviceIndex device) : drawn_(drawn_from(default_generator(device))) {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    before_ = cpu.get_state();
    cpu.set_state(drawn_.get_state());
  }
  DrawsOfDevice(const DrawsOfDevice&) = delete;
  DrawsOfDevice& operator=(const DrawsOfDevice&) = delete;
  ~DrawsOfDevice() {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    drawn_.set_state(cpu.get_state());
    cpu.set_state(before_);
  }

 private:
  at::Generator& drawn_;
  at::Tensor before_;
};

// Notes a kernel, and returns whether its last bits are to be altered.
bool note_kernel(const std::string& name) {
  const std::lock_guard lock(notes().mutex);
  ++notes().counts.kernels;
  if (notes().is_recording) notes().recorded.push_back(name);
  return notes().altered.count(name) > 0;
}

// Every operator that has no kernel of its own below. A kernel begins when its stream has come to it, and is over when
// this returns; views wait for nothing.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = op.schema();
  const auto argument_count = schema.arguments().size();
  const size_t begin = stack->size() - argument_count;

  Streams::get().check();
  Aliases aliases;
  std::optional<c10::Device> wanted;
  std::optional<std::string> on_host_argument;
  bool has_generator = false;
  std::vector<size_t> generators;
  for (size_t index = 0; index < argument_count; ++index) {
    c10::IValue& value = (*stack)[begin + index];
    const c10::Argument& argument = schema.arguments()[index];
    if (is_of_kind(argument, c10::TypeKind::GeneratorType)) {
      has_generator = true;
      generators.push_back(begin + index);
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      wanted = value.toDevice();
      if (!wanted->has_index()) wanted = device_at(current_device());
      value = c10::Device(c10::kCPU);
    } else {
      value = with_tensors(value, [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) on_host_argument = argument.name();
        return aliases.of(tensor);
      });
    }
  }
  const c10::Device device = aliases.device() ? *aliases.device() : wanted.value_or(device_at(current_device()));
  TORCH_CHECK(!on_host_argument || may_mix_hosts(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, ", device,
              " and cpu! (when checking argument ", on_host_argument.value_or(""), " in method ", schema.name(), ")");
  for (const size_t index : generators) {
    c10::IValue& value = (*stack)[index];
    const at::Generator& given = value.isNone() ? default_generator(device.index()) : value.toGenerator();
    TORCH_CHECK(given.device().type() == c10::kPrivateUse1, "Expected a '", device,
                "' device type for generator but "
                "found '",
                given.device(), "'");
    value = drawn_from(given);
  }

  const bool runs = !is_view(schema);
  if (runs) Streams::get().finish(Streams::get().current(device.index()));
  const bool is_altered = runs && note_kernel(schema.name());
  const torch::jit::Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  {
    std::optional<DrawsOfDevice> draws;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace(device.index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (is_altered) {
    for (size_t index = 0; index < argument_count; ++index) {
      const auto* const alias = schema.arguments()[index].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        with_tensors(arguments[index], [](const at::Tensor& tensor) {
          alter(tensor);
          return tensor;
        });
      }
    }
  }
  if (runs) aliases.take_over_sizes();
  const size_t result_count = schema.returns().size();
  for (size_t index = stack->size() - result_count; index < stack->size(); ++index) {
    c10::IValue& value = (*stack)[index];
    const bool stays = schema.name() == "aten::_pack_padded_sequence" && index + 1 == stack->size();
    if (stays) continue;
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      if (is_altered && tensor.defined() && !aliases.has(tensor)) alter(tensor);
      return aliases.on_device(tensor, device);
    });
  }
}

// ---- Copies

bool is_dense_as(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.is_non_overlapping_and_dense() && !one.is_conj() && !one.is_neg() && !other.is_conj() && !other.is_neg();
}

void note_copy(bool is_in, int64_t bytes, bool is_late) {
  const std::lock_guard lock(notes().mutex);
  Counts& counts = notes().counts;
  (is_in ? counts.copies_in : counts.copies_out) += 1;
  (is_in ? counts.bytes_in : counts.bytes_out) += bytes;
  if (is_late) ++counts.late_copies;
}

// Torch asks whoever stands for its allocator of pinned memory, and so does this.
void report(const at::Tensor& host, c10::Stream stream) {
  at::getHostAllocator(at::kPrivateUse1)
      ->record_event(host.mutable_data_ptr(), host.storage().data_ptr().get_context(), stream);
}

// From memory that is not pinned the bytes are taken at once, as a driver does; from pinned memory when the copy runs.
void copy_in(const at::Tensor& host, const at::Tensor& target, bool is_late) {
  const c10::Stream stream = current_stream(target);
  const auto bytes = static_cast<size_t>(target.numel()) * target.element_size();
  auto* const place = on_host(target.mutable_data_ptr());
  note_copy(/*is_in=*/true, static_cast<int64_t>(bytes), is_late);
  if (is_dense_as(host, target) && is_pinned(host.const_data_ptr())) {
    const void* const source = host.const_data_ptr();
    Streams::get().enqueue_copy(stream, [=] { std::memcpy(place, source, bytes); });
    report(host, stream);
  } else {
    const at::Tensor taken = host.expand_as(target).to(target.scalar_type(), false, /*copy=*/true).contiguous();
    // Tensors of the CPU on memory of the device, so that nothing of the device is freed when the work is.
    const at::Tensor written = Aliases().of(target);
    Streams::get().enqueue_copy(stream, [taken, written] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      written.copy_(taken);
    });
  }
  if (!is_late) Streams::get().finish(stream);
}

void copy_out(const at::Tensor& source, const at::Tensor& host, bool is_late) {
  const c10::Stream stream = current_stream(source);
  const auto bytes = static_cast<size_t>(host.numel()) * host.element_size();
  const auto* const place = on_host(source.const_data_ptr());
  if (is_late && is_dense_as(source, host) && is_pinned(host.const_data_ptr())) {
    note_copy(/*is_in=*/false, static_cast<int64_t>(bytes), /*is_late=*/true);
    void* const target = host.mutable_data_ptr();
    Streams::get().enqueue_copy(stream, [=] { std::memcpy(target, place, bytes); });
    report(host, stream);
    return;
  }
  note_copy(/*is_in=*/false, static_cast<int64_t>(bytes), /*is_late=*/false);
  Streams::get().finish(stream);
  host.copy_(Aliases().of(source));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Streams::get().check();
  if (target.numel() == 0) return target;
  if (source.is_cpu()) {
    copy_in(source, target, non_blocking);
  } else if (target.is_cpu()) {
    copy_out(source, target, non_blocking);
  } else {
    Streams::get().finish(current_stream(source));
    Streams::get().finish(current_stream(target));
    note_kernel("aten::copy_");
    Aliases().of(target).copy_(Aliases().of(source));
  }
  return target;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> memory_format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (memory_format && *memory_format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*memory_format);
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                        static_cast<size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize(target, source.sizes(), std::nullopt);
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Streams::get().check();
  Streams::get().finish(current_stream(self));
  note_copy(/*is_in=*/false, static_cast<int64_t>(self.element_size()), /*is_late=*/false);
  return Aliases().of(self).item();
}

// ---- Memory

c10::Device on(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : device_at(current_device());
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "simgpu has strided tensors alone");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(on(device));
  return at::Tensor(at::detail::empty_generic(sizes, &device_allocator(),
                                              c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  return make_empty(sizes, strides, c10::dtype_or_default(dtype), on(device));
}

at::Tensor& set_to_place(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_to_place(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to_place(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  return set_to_place(self,
                      at::Storage(c10::Storage::use_byte_size_t(), 0, allocate(self.device().index(), 0),
                                  &device_allocator(), /*resizable=*/true),
                      0, {0}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) { record_use(self.storage().data(), stream); }

// The CPU has kernels of its own for these, which torch's kernels for any device would keep from being used. In a
// convolution, which is one for any device, those choose another algorithm.
std::vector<c10::OperatorName> shadowed_operators() {
  std::vector<c10::OperatorName> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const bool is_shadowed = op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                             op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    const bool is_own = op && op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    if ((is_shadowed && !is_own) || name.name == "aten::convolution" || name.name == "aten::convolution_backward")
      names.push_back(name);
  }
  return names;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_", set_to_nothing);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Storage_storage_offset", set_to_place);
  m.impl("record_stream", record_stream);
  for (const c10::OperatorName& name : shadowed_operators())
    m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace

Counts counts() {
  const std::lock_guard lock(notes().mutex);
  return notes().counts;
}

void reset_counts() {
  const std::lock_guard lock(notes().mutex);
  notes().counts = {};
}

void set_altered_operators(std::vector<std::string> names) {
  const std::lock_guard lock(notes().mutex);
  notes().altered = {names.begin(), names.end()};
}

void record_operators(bool is_recording) {
  const std::lock_guard lock(notes().mutex);
  notes().is_recording = is_recording;
  if (is_recording) notes().recorded.clear();
}

std::vector<std::string> recorded_operators() {
  const std::lock_guard lock(notes().mutex);
  return notes().recorded;
}

}  // namespace simgpu
