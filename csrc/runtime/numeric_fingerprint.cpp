// SPDX-License-Identifier: Apache-2.0
#include "runtime/numeric_fingerprint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <cstring>
#include <exception>
#include <span>
#include <string_view>
#include <vector>

#include "graph/sha256.h"
#include "runtime/kernel_settings.h"

namespace penstock::runtime {
namespace {

using at::Tensor;

// More than whole vectors of any width, so that the loops for the remaining elements run as well.
constexpr int64_t kLength = 1027;

// Returns numbers from low to high, the same in every process: they are made with integers and one division.
Tensor numbers(double low, double high, uint64_t seed, int64_t count = kLength) {
  Tensor made = at::empty({count}, at::kDouble);
  auto* values = made.mutable_data_ptr<double>();
  uint64_t state = seed;
  for (int64_t index = 0; index < count; ++index) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    values[index] = low + (high - low) * (static_cast<double>(state >> 11) / 9007199254740992.0);
  }
  return made;
}

class Samples {
 public:
  void add(const Tensor& tensor) {
    const Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
    hash_.update(std::as_bytes(std::span(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes())));
  }
  void add(std::string_view text) { hash_.update(text); }
  void add(uint64_t number) { hash_.update(std::as_bytes(std::span(&number, 1))); }

  uint64_t take() {
    const auto digest = hash_.finish();
    uint64_t number = 0;
    std::memcpy(&number, digest.data(), sizeof number);
    return number;
  }

 private:
  graph::Sha256 hash_;
};

struct Operands {
  explicit Operands(at::ScalarType dtype)
      : small(numbers(-3, 3, 1).to(dtype)),
        large(numbers(-4000, 4000, 2).to(dtype)),
        positive(numbers(0.001, 30, 3).to(dtype)),
        unit(numbers(-0.999, 0.999, 4).to(dtype)) {}

  Tensor small, large, positive, unit;
};

void add_arithmetic(Samples& samples, const Operands& x) {
  for (const Tensor& made : {x.small + x.large,
                             x.small - x.large,
                             x.small * x.large,
                             x.large / x.small,
                             x.small + 0.1,
                             x.small * 0.3,
                             x.large / 255,
                             x.large.floor(),
                             x.large.ceil(),
                             x.large.trunc(),
                             x.large.frac(),
                             x.large.remainder(x.positive),
                             x.large.fmod(x.positive),
                             at::floor_divide(x.large, x.positive),
                             x.large.reciprocal(),
                             x.small.square(),
                             x.small.clamp(-1, 1),
                             x.small.abs(),
                             x.small.sign(),
                             x.small.relu(),
                             at::maximum(x.small, x.unit),
                             x.large.to(at::kInt),
                             x.large.to(at::kBFloat16),
                             x.large.to(at::kHalf),
                             x.large.to(at::kFloat),
                             x.large.to(at::kDouble),
                             std::get<0>(x.large.sort()),
                             std::get<1>(x.large.topk(7)),
                             at::bucketize(x.small, std::get<0>(x.unit.sort())),
                             x.small > x.unit})
    samples.add(made);
}

void add_moves(Samples& samples) {
  const Tensor image = numbers(0, 255, 5, 3 * 17 * 19).view({1, 3, 17, 19}).to(at::kFloat);
  samples.add(at::max_pool2d(image, {3, 3}));
  samples.add(at::upsample_nearest2d(image, at::IntArrayRef({11, 29})));
  samples.add(image.flip({3}).permute({0, 2, 3, 1}));
  const Tensor integers = numbers(-2e9, 2e9, 6).to(at::kLong);
  samples.add((integers * 2654435761).remainder(1000));
  samples.add(integers.bitwise_and(0xffff).__rshift__(3));
  samples.add(integers.to(at::kByte).to(at::kFloat) / 255);
  samples.add(numbers(-1e-38, 1e-38, 7).to(at::kFloat) * 0.01);  // denormals
}

void add_complex(Samples& samples, const Operands& x) {
  const Tensor value = at::complex(x.small, x.unit);
  const Tensor other = at::complex(x.unit, x.positive);
  for (const Tensor& made : {value * other, value / other, value + other, value.abs(), value.angle()})
    samples.add(made);
}

void add_fused(Samples& samples, const Operands& x) {
  for (const Tensor& made :
       {at::add(x.small, x.large, 0.3), at::sub(x.small, x.large, 0.7), at::addcmul(x.small, x.large, x.unit, 0.3),
        at::addcdiv(x.small, x.large, x.positive, 0.3), at::lerp(x.small, x.large, 0.3),
        at::lerp(x.small, x.large, x.unit), at::arange(0, 100, 0.1, x.small.options()),
        at::linspace(0, 1, kLength, x.small.options()), at::hardswish(x.small), at::hardsigmoid(x.small),
        at::leaky_relu(x.small), at::round(x.small, 3)})
    samples.add(made);
}

void add_exponential(Samples& samples, const Operands& x) {
  for (const Tensor& made : {x.small.exp(),
                             x.small.exp2(),
                             x.small.expm1(),
                             x.positive.log(),
                             x.positive.log2(),
                             x.positive.log10(),
                             x.positive.log1p(),
                             x.small.sigmoid(),
                             at::softplus(x.small),
                             at::silu(x.small),
                             at::elu(x.small),
                             at::mish(x.small),
                             at::gelu(x.small),
                             at::gelu(x.small, "tanh"),
                             x.small.erf(),
                             x.small.erfc(),
                             x.unit.erfinv(),
                             x.positive.lgamma(),
                             at::logaddexp(x.small, x.unit),
                             at::xlogy(x.small, x.positive),
                             at::log_sigmoid(x.small)})
    samples.add(made);
}

void add_trigonometric(Samples& samples, const Operands& x) {
  for (const Tensor& made : {x.large.sin(), x.large.cos(), x.large.tan(), x.unit.asin(), x.unit.acos(), x.small.atan(),
                             at::atan2(x.small, x.unit), x.small.sinh(), x.small.cosh(), x.small.tanh(),
                             x.small.asinh(), x.unit.atanh(), x.small.sinc(), x.positive.add(1).acosh()})
    samples.add(made);
}

void add_roots(Samples& samples, const Operands& x) {
  for (const Tensor& made :
       {x.positive.sqrt(), x.positive.rsqrt(), x.positive.pow(0.45), x.positive.pow(3), x.positive.pow(2),
        x.positive.pow(-1), x.positive.pow(x.small), at::pow(2.5, x.small), at::hypot(x.small, x.large)})
    samples.add(made);
}

void add_sums(Samples& samples, const Operands& x) {
  const Tensor table = x.small.narrow(0, 0, 1024).view({32, 32});
  const Tensor image = table.view({1, 4, 16, 16});
  for (const Tensor& made : {x.small.sum(), x.large.mean(), table.sum(0), table.sum(1), table.mean(0), table.mean(1),
                             table.std(0), table.std(1), table.var(), x.unit.prod(), x.small.cumsum(0), table.norm(),
                             table.norm(2, {0}), table.logsumexp({1}), at::avg_pool2d(image, {3, 3}),
                             at::adaptive_avg_pool2d(image, {5, 3}), x.positive.nansum()})
    samples.add(made);
}

void add_normalising(Samples& samples, const Operands& x) {
  const Tensor table = x.small.narrow(0, 0, 1024).view({16, 64});
  const Tensor image = table.view({2, 8, 8, 8});
  for (const Tensor& made :
       {at::softmax(table, 1), at::softmax(table, 0), at::log_softmax(table, 1), at::log_softmax(table, 0),
        at::layer_norm(table, {64}), at::group_norm(image, 4),
        at::batch_norm(image, {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, /*cudnn_enabled=*/false)})
    samples.add(made);
}

void add_matrices(Samples& samples, const Operands& x) {
  const Tensor left = x.small.narrow(0, 0, 1024).view({16, 64});
  const Tensor right = x.unit.narrow(0, 0, 1024).view({64, 16});
  for (const Tensor& made :
       {at::mm(left, right), at::mv(left, right.select(1, 0)), at::dot(x.small, x.unit),
        at::linear(left, right.t(), x.small.narrow(0, 0, 16)), at::bmm(left.view({2, 8, 64}), right.view({2, 64, 8}))})
    samples.add(made);
}

void add_convolutions(Samples& samples, const Operands& x) {
  const Tensor image = x.small.narrow(0, 0, 3 * 16 * 16).view({1, 3, 16, 16});
  const Tensor kernels = x.unit.narrow(0, 0, 8 * 3 * 3 * 3).view({8, 3, 3, 3});
  samples.add(at::conv2d(image, kernels));
  samples.add(at::conv_transpose2d(image, kernels.narrow(0, 0, 3)));
  samples.add(at::conv1d(x.small.view({1, 1, kLength}), x.unit.narrow(0, 0, 4 * 9).view({4, 1, 9})));
}

void add_fourier(Samples& samples, const Operands& x) {
  for (const int64_t length : {256, 400, 1027}) {
    const Tensor made = at::fft_rfft(x.small.narrow(0, 0, length));
    samples.add(made);
    samples.add(at::fft_irfft(made));
    samples.add(at::fft_fft(made));
  }
}

void add_interpolation(Samples& samples, at::ScalarType dtype) {
  const Tensor image = numbers(0, 255, 5, 3 * 17 * 19).view({1, 3, 17, 19}).to(dtype);
  const at::IntArrayRef size({11, 29});
  samples.add(at::upsample_bilinear2d(image, size, false));
  samples.add(at::upsample_bicubic2d(image, size, false));
  samples.add(at::_upsample_bilinear2d_aa(image, size, false));
  samples.add(at::_upsample_bicubic2d_aa(image, size, false));
  if (dtype == at::kByte) return;
  samples.add(at::upsample_linear1d(image.select(2, 0), at::IntArrayRef({29}), false));
  const Tensor grid = numbers(-1, 1, 8, 5 * 6 * 2).view({1, 5, 6, 2}).to(dtype);
  samples.add(at::grid_sampler(image, grid, 0, 0, false));
}

void add_random(Samples& samples) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{20});
  samples.add(at::rand({kLength}, generator));
  samples.add(at::randn({kLength}, generator));
  samples.add(at::randn({7}, generator));
  samples.add(at::randint(0, 1000, {kLength}, generator, at::kLong));
  samples.add(at::randperm(kLength, generator, at::kLong));
  samples.add(at::empty({kLength}).bernoulli_(0.3, generator));
  samples.add(at::empty({kLength}).exponential_(1, generator));
}

template <typename Add>
uint64_t fingerprint_of(const Add& add) {
  Samples samples;
  try {
    add(samples);
  } catch (const std::exception&) {
    samples.add("not built into this torch");
  }
  return samples.take();
}

// For real numbers, in each precision that has separate kernels.
template <typename Add>
uint64_t by_precision(const Add& add, const std::vector<at::ScalarType>& dtypes) {
  return fingerprint_of([&](Samples& samples) {
    for (const at::ScalarType dtype : dtypes) add(samples, Operands(dtype));
  });
}

Numerics compute() {
  Numerics found{};
  const auto set = [&](NumericFamily family, uint64_t number) { found[static_cast<size_t>(family)] = number; };
  const std::vector<at::ScalarType> all{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  const std::vector<at::ScalarType> wide{at::kFloat, at::kDouble};
  set(NumericFamily::kArithmetic, fingerprint_of([&](Samples& samples) {
        for (const at::ScalarType dtype : all) add_arithmetic(samples, Operands(dtype));
        add_moves(samples);
      }));
  set(NumericFamily::kComplex, by_precision(add_complex, wide));
  set(NumericFamily::kFused, by_precision(add_fused, all));
  set(NumericFamily::kExponential, by_precision(add_exponential, all));
  set(NumericFamily::kTrigonometric, by_precision(add_trigonometric, all));
  set(NumericFamily::kRoots, by_precision(add_roots, all));
  set(NumericFamily::kSums, by_precision(add_sums, all));
  set(NumericFamily::kNormalising, by_precision(add_normalising, all));
  set(NumericFamily::kMatrices, by_precision(add_matrices, all));
  set(NumericFamily::kConvolutions, by_precision(add_convolutions, {at::kFloat, at::kDouble, at::kBFloat16}));
  set(NumericFamily::kFourier, by_precision(add_fourier, wide));
  set(NumericFamily::kInterpolation, fingerprint_of([](Samples& samples) {
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kByte}) add_interpolation(samples, dtype);
      }));
  set(NumericFamily::kRandom, fingerprint_of(add_random));
  set(NumericFamily::kOther, fingerprint_of([&](Samples& samples) {
        for (const uint64_t number : found) samples.add(number);
        samples.add(at::get_cpu_capability());
      }));
  return found;
}

}  // namespace

const Numerics& numeric_fingerprint() {
  static const Numerics fingerprint = [] {
    const ExecutionGuard guard;
    KernelSettings plain = KernelSettings::now();
    plain.flushes_denormals = plain.is_deterministic = false;
    plain.uses_mkldnn = true;
    plain.default_dtype = caffe2::TypeMeta::Make<float>();
    const KernelSettingsGuard settings(plain);
    Numerics found{};
    // Inside a parallel region every kernel has one thread, and no setting has to be changed for it.
    at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t) {
      if (begin == 0) found = compute();
    });
    return found;
  }();
  return fingerprint;
}

}  // namespace penstock::runtime
