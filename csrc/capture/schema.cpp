// SPDX-License-Identifier: Apache-2.0
#include "capture/schema.h"

#include <ATen/core/function_schema.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <string>

namespace penstock::capture {

std::optional<c10::OperatorHandle> find_operator(std::string_view name) {
  const size_t dot = name.find('.');
  const std::string base(name.substr(0, dot));
  const std::string overload(dot == std::string_view::npos ? std::string_view() : name.substr(dot + 1));
  return c10::Dispatcher::singleton().findSchema(c10::OperatorName(base, overload));
}

Result<MatchedCall> match_schema(const graph::Node& node) {
  // Other namespaces belong to other libraries, which may change their operators, so an operator of theirs has to be
  // declared by the user.
  std::string_view name = node.op;
  if (name.starts_with(kDeclared)) {
    name.remove_prefix(kDeclared.size());
  } else if (!name.starts_with("aten::")) {
    return Fault{Errc::kUnsupported, "is not an operator of torch itself (declare it with penstock.stateless)"};
  }
  const auto op = find_operator(name);
  if (!op) return Fault{Errc::kUnsupported, "is not an operator of this version of torch"};
  const c10::FunctionSchema& schema = op->schema();
  const auto& parameters = schema.arguments();
  MatchedCall call{*op, std::vector<const graph::Argument*>(parameters.size(), nullptr)};
  const auto refuse = [&](const std::string& why) {
    return Fault{Errc::kMalformed, "does not fit its schema: " + why};
  };
  if (node.args.size() > parameters.size())
    return refuse(std::to_string(node.args.size()) + " arguments, but it takes " + std::to_string(parameters.size()));
  for (size_t i = 0; i < node.args.size(); ++i) {
    if (parameters[i].kwarg_only()) return refuse(parameters[i].name() + " must be given by name");
    call.arguments[i] = &node.args[i];
  }
  for (const graph::Keyword& keyword : node.kwargs) {
    const auto index = schema.argumentIndexWithName(keyword.name);
    if (!index) return refuse("it has no argument " + keyword.name);
    if (call.arguments[*index] != nullptr) return refuse(keyword.name + " is given twice");
    call.arguments[*index] = &keyword.value;
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    if (call.arguments[i] == nullptr && !parameters[i].default_value())
      return refuse("the argument " + parameters[i].name() + " is missing");
  if (schema.is_vararg() || schema.is_varret()) return refuse("it takes any number of arguments");
  if (node.results.size() != schema.returns().size())
    return refuse(std::to_string(node.results.size()) + " results, but it has " +
                  std::to_string(schema.returns().size()));
  return call;
}

const graph::Argument* argument_named(const MatchedCall& call, std::string_view name) {
  const auto index = call.op.schema().argumentIndexWithName(name);
  return index ? call.arguments[*index] : nullptr;
}

graph::Device device_from_torch(const c10::Device& device) {
  graph::Device name{c10::DeviceTypeName(device.type(), /*lower_case=*/true), std::nullopt};
  if (device.has_index()) name.index = static_cast<uint32_t>(device.index());
  return name;
}

std::optional<c10::Device> accelerator_of(const graph::Device& name) {
  if (name.type == "cpu" || name.type == "meta") return std::nullopt;
  try {
    const c10::Device device(graph::name_of(name));
    if (c10::impl::hasDeviceGuardImpl(device.type())) return device;
  } catch (const c10::Error&) {
    // Torch does not know a device of that name.
  }
  return std::nullopt;
}

}  // namespace penstock::capture
