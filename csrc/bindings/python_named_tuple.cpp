// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_named_tuple.h"

#include <algorithm>

#include "bindings/raise.h"
#include "wire/nest.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

py::object as_object(PyTypeObject& type) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&type));
}

// The attribute that a class itself stores under a name, without involving its metaclass; null if there is none.
py::object kept_by_class(py::handle type, const py::str& name) {
  const py::object names = as_object(PyType_Type).attr("__dict__")["__dict__"].attr("__get__")(type);
  return names.contains(name) ? py::object(names[name]) : py::object();
}

// The fields of a named-tuple class, its own or inherited; null for any other class.
py::object fields_of(py::handle type) {
  auto* const cls = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_Check(type.ptr()) || cls == &PyTuple_Type || !PyType_IsSubtype(cls, &PyTuple_Type)) return {};
  for (py::handle base : py::reinterpret_borrow<py::tuple>(cls->tp_mro)) {
    py::object fields = kept_by_class(base, "_fields");
    if (!fields) continue;
    if (!PyTuple_CheckExact(fields.ptr())) return {};
    const auto names = py::reinterpret_borrow<py::tuple>(fields);
    const bool are_names = std::ranges::all_of(names, [](py::handle name) { return PyUnicode_CheckExact(name.ptr()); });
    return are_names ? fields : py::object();
  }
  return {};
}

// The class or function with that qualified name in an imported module; null if there is none. Imports no module, and
// bypasses custom attribute lookup of modules and classes.
py::object find_imported(std::string_view module_name, std::string_view path) {
  const auto modules = py::reinterpret_borrow<py::dict>(PyImport_GetModuleDict());
  const py::str module_key(module_name.data(), module_name.size());
  if (!modules.contains(module_key)) return {};
  const py::object module = modules[module_key];
  if (!PyModule_Check(module.ptr())) return {};
  const auto own_names = py::reinterpret_borrow<py::dict>(PyModule_GetDict(module.ptr()));
  size_t dot = path.find('.');
  const py::str first(path.data(), std::min(dot, path.size()));
  py::object found = own_names.contains(first) ? py::object(own_names[first]) : py::object();
  while (found && dot != std::string_view::npos) {
    path.remove_prefix(dot + 1);
    dot = path.find('.');
    const py::str part(path.data(), std::min(dot, path.size()));
    found = PyType_Check(found.ptr()) ? kept_by_class(found, part) : py::object();
  }
  return found;
}

[[noreturn]] void raise_unmade(std::string_view name, const std::string& what) {
  raise_error({Errc::kUnsupported, "a batch contains a named tuple of the class '" + std::string(name) + "', " + what +
                                       "; import the module that defines it in the trainer, in the workers' version"});
}

}  // namespace

bool is_named_tuple(py::handle object) {
  const py::object fields = fields_of(py::type::handle_of(object));
  return fields && PyTuple_GET_SIZE(fields.ptr()) == PyTuple_GET_SIZE(object.ptr());
}

std::string field_name(py::handle named_tuple, size_t index) {
  const auto fields = py::reinterpret_borrow<py::tuple>(fields_of(py::type::handle_of(named_tuple)));
  return fields[index].cast<std::string>();
}

std::string named_tuple_refusal(py::handle named_tuple) {
  if (named_tuple_name(named_tuple).size() > wire::kNamedTupleNameBytesMax) return "whose class name is too long";
  if (named_tuple_name(named_tuple).find("<locals>") != std::string::npos) {
    return "whose class was made inside a function, where the trainer cannot find it";
  }
  const py::object attributes = py::getattr(named_tuple, "__dict__", py::none());
  if (!attributes.is_none() && py::len(attributes) > 0) return "which has attributes in addition to its fields";
  return "";
}

std::string named_tuple_name(py::handle named_tuple) {
  const py::handle type = py::type::handle_of(named_tuple);
  return py::str(type.attr("__module__")).cast<std::string>() + ":" +
         py::str(type.attr("__qualname__")).cast<std::string>();
}

py::object make_named_tuple(std::string_view name, const py::tuple& values) {
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "strict"));
  if (!text) {
    PyErr_Clear();
    raise_unmade("?", "whose name is not UTF-8");
  }
  const size_t colon = name.find(':');
  if (colon == std::string_view::npos) raise_unmade(name, "which contains no module name");
  const py::object type = find_imported(name.substr(0, colon), name.substr(colon + 1));
  if (!type) raise_unmade(name, "which is in no module that this process has imported");
  const py::object fields = fields_of(type);
  // A finalizer of the class would let the sender choose code to run.
  const bool has_finalizer = fields && reinterpret_cast<PyTypeObject*>(type.ptr())->tp_finalize != nullptr;
  if (!fields || has_finalizer) raise_unmade(name, "which is not a class of named tuples here");
  if (py::len(fields) != values.size()) {
    raise_unmade(name, "with " + std::to_string(values.size()) + " values where the class here has " +
                           std::to_string(py::len(fields)) + " fields");
  }
  return as_object(PyTuple_Type).attr("__new__")(type, values);
}

}  // namespace penstock::bindings
