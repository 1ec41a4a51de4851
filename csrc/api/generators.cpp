// SPDX-License-Identifier: Apache-2.0
#include "api/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "api/exceptions.h"
#include "base/base64.h"

namespace penstock::api {
namespace {

at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }

std::string to_text(const at::Tensor& state) {
  return to_base64({static_cast<const std::byte*>(state.const_data_ptr()), state.nbytes()});
}

// Validated with a scratch generator, since the state may be from an untrusted source.
at::Tensor to_tensor(const Value& text, const std::string& place) {
  const auto bytes = text.kind() == Value::Kind::kText ? from_base64(text.text()) : std::nullopt;
  if (!bytes) refuse(place + " must be text in base64, got " + text.describe() + "; load the state as it was saved");
  at::Tensor state = at::empty({static_cast<int64_t>(bytes->size())}, at::TensorOptions().dtype(at::kByte));
  std::copy(bytes->begin(), bytes->end(), static_cast<std::byte*>(state.mutable_data_ptr()));
  try {
    at::detail::createCPUGenerator().set_state(state);
  } catch (const c10::Error& error) {
    refuse(place + " must be the state of a generator of torch, and torch refuses it: " +
           error.what_without_backtrace() + "; load the state as it was saved");
  }
  return state;
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor get_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

GeneratorSnapshot GeneratorSnapshot::take(const std::optional<at::Generator>& own) {
  GeneratorSnapshot snapshot = take_own(own);
  snapshot.of_default_ = get_state(default_generator());
  return snapshot;
}

GeneratorSnapshot GeneratorSnapshot::take_own(const std::optional<at::Generator>& own) {
  GeneratorSnapshot snapshot;
  if (own) snapshot.of_own_ = get_state(*own);
  return snapshot;
}

GeneratorSnapshot GeneratorSnapshot::from_value(const Value& value) {
  GeneratorSnapshot snapshot;
  for (const char* part : {"globals", "own"}) {
    const Value* found = value.kind() == Value::Kind::kDict ? value.find(part) : nullptr;
    if (found == nullptr || found->kind() != Value::Kind::kDict)
      refuse(std::string("state['generators']['") + part + "'] must be a dict; load the state as it was saved");
  }
  // None in the state of a job with several ranks: each rank has its own.
  const Value& of_default = value["globals"]["torch"];
  if (!of_default.is_none()) snapshot.of_default_ = to_tensor(of_default, "state['generators']['globals']['torch']");
  if (const Value* own = value["own"].find("loader"))
    snapshot.of_own_ = to_tensor(*own, "state['generators']['own']['loader']");
  snapshot.of_random_ = value["globals"]["random"];
  snapshot.of_numpy_ = value["globals"]["numpy"];
  return snapshot;
}

Value GeneratorSnapshot::to_value(bool shuffles) const {
  Value::Entries own;
  if (of_own_.defined()) {
    // The generator under each path by which Python's loader finds it.
    own.push_back({"loader", to_text(of_own_)});
    if (shuffles) {
      own.push_back({"sampler", to_text(of_own_)});
      own.push_back({"batch_sampler.sampler", to_text(of_own_)});
    }
  }
  return Value::dict({{"globals", Value::dict({{"torch", of_default_.defined() ? to_text(of_default_) : Value()},
                                               {"random", of_random_},
                                               {"numpy", of_numpy_}})},
                      {"own", Value::dict(std::move(own))}});
}

void GeneratorSnapshot::put_back_default() const {
  if (of_default_.defined()) set_state(default_generator(), of_default_);
}

void GeneratorSnapshot::put_back_own(const std::optional<at::Generator>& own) const {
  if (own && of_own_.defined()) set_state(*own, of_own_);
}

bool GeneratorSnapshot::is_of_now() const {
  return !of_default_.defined() || at::equal(of_default_, get_state(default_generator()));
}

GeneratorsReplayed::GeneratorsReplayed(const GeneratorSnapshot& snapshot)
    : before_(GeneratorSnapshot::take(std::nullopt)) {
  snapshot.put_back_default();
}

GeneratorsReplayed::~GeneratorsReplayed() { before_.put_back_default(); }

}  // namespace penstock::api
