# SPDX-License-Identifier: Apache-2.0
# Finds libzmq and the headers of cppzmq. Gives ZeroMQ::libzmq and ZeroMQ_VERSION.
# Debian's libzmq3-dev ships a CMake configuration that names a static library it does not have, so this looks for itself.

find_path(ZeroMQ_INCLUDE_DIR zmq.h)
find_path(ZeroMQ_CXX_INCLUDE_DIR zmq.hpp)
find_library(ZeroMQ_LIBRARY NAMES zmq)

if(ZeroMQ_INCLUDE_DIR)
  file(STRINGS "${ZeroMQ_INCLUDE_DIR}/zmq.h" _zmq_lines REGEX "#define ZMQ_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" _zmq_numbers "${_zmq_lines}")
  list(JOIN _zmq_numbers "." ZeroMQ_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  ZeroMQ
  REQUIRED_VARS ZeroMQ_LIBRARY ZeroMQ_INCLUDE_DIR ZeroMQ_CXX_INCLUDE_DIR
  VERSION_VAR ZeroMQ_VERSION
  REASON_FAILURE_MESSAGE "On Debian and Ubuntu: apt-get install libzmq3-dev cppzmq-dev")
mark_as_advanced(ZeroMQ_INCLUDE_DIR ZeroMQ_CXX_INCLUDE_DIR ZeroMQ_LIBRARY)

if(ZeroMQ_FOUND AND NOT TARGET ZeroMQ::libzmq)
  add_library(ZeroMQ::libzmq UNKNOWN IMPORTED)
  set_target_properties(ZeroMQ::libzmq PROPERTIES
    IMPORTED_LOCATION "${ZeroMQ_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${ZeroMQ_INCLUDE_DIR};${ZeroMQ_CXX_INCLUDE_DIR}")
endif()
