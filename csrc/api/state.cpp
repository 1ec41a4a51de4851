// SPDX-License-Identifier: Apache-2.0
#include "penstock/state.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <utility>

#include "api/exceptions.h"
#include "api/state_access.h"

namespace penstock {
namespace {

constexpr const char* kArchiveKey = "penstock.loader";

}  // namespace

struct State::Content {
  Value value;
};

State::State() : content_(std::make_unique<Content>()) {}
State::~State() = default;
State::State(const State& other) : content_(std::make_unique<Content>(*other.content_)) {}
State& State::operator=(const State& other) {
  if (this != &other) *content_ = *other.content_;
  return *this;
}
// A moved-from state is a state without a position.
State::State(State&& other) noexcept : State() { content_.swap(other.content_); }
State& State::operator=(State&& other) noexcept {
  content_.swap(other.content_);
  return *this;
}

State StateAccess::make(Value value) {
  State state;
  state.content_->value = std::move(value);
  return state;
}

const Value& StateAccess::value_of(const State& state) { return state.content_->value; }

State State::from_json(std::string_view text) {
  Value value = Value::from_json(text);
  if (value.kind() != Value::Kind::kDict && !value.is_none())
    api::refuse("the text is the JSON of " + value.describe() + ", but must be the JSON of a loader's state");
  if (value.kind() == Value::Kind::kDict && value.size() == 0) value = Value();
  return StateAccess::make(std::move(value));
}

std::string State::to_json() const { return content_->value.is_none() ? "{}" : content_->value.to_json(); }

void State::save(torch::serialize::OutputArchive& archive) const { archive.write(kArchiveKey, c10::IValue(to_json())); }

void State::load(torch::serialize::InputArchive& archive) {
  c10::IValue text;
  if (!archive.try_read(kArchiveKey, text) || !text.isString()) {
    api::refuse(std::string("the archive has no \"") + kArchiveKey + "\"; pass an archive written by State::save()");
  }
  *this = from_json(text.toStringRef());
}

}  // namespace penstock
