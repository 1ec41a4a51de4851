# SPDX-License-Identifier: Apache-2.0
# Finds libdeflate. Gives Libdeflate::libdeflate and Libdeflate_VERSION.

find_path(Libdeflate_INCLUDE_DIR libdeflate.h)
find_library(Libdeflate_LIBRARY NAMES deflate)

if(Libdeflate_INCLUDE_DIR)
  file(STRINGS "${Libdeflate_INCLUDE_DIR}/libdeflate.h" _libdeflate_line REGEX "#define LIBDEFLATE_VERSION_STRING")
  string(REGEX MATCH "[0-9.]+" Libdeflate_VERSION "${_libdeflate_line}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libdeflate
  REQUIRED_VARS Libdeflate_LIBRARY Libdeflate_INCLUDE_DIR
  VERSION_VAR Libdeflate_VERSION
  REASON_FAILURE_MESSAGE "On Debian and Ubuntu: apt-get install libdeflate-dev")
mark_as_advanced(Libdeflate_INCLUDE_DIR Libdeflate_LIBRARY)

if(Libdeflate_FOUND AND NOT TARGET Libdeflate::libdeflate)
  add_library(Libdeflate::libdeflate UNKNOWN IMPORTED)
  set_target_properties(Libdeflate::libdeflate PROPERTIES
    IMPORTED_LOCATION "${Libdeflate_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${Libdeflate_INCLUDE_DIR}")
endif()
