# SPDX-License-Identifier: Apache-2.0
# Finds libsodium. Gives Sodium::sodium and Sodium_VERSION.

find_path(Sodium_INCLUDE_DIR sodium.h)
find_library(Sodium_LIBRARY NAMES sodium)

if(Sodium_INCLUDE_DIR)
  file(STRINGS "${Sodium_INCLUDE_DIR}/sodium/version.h" _sodium_line REGEX "#define SODIUM_VERSION_STRING ")
  string(REGEX MATCH "[0-9.]+" Sodium_VERSION "${_sodium_line}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Sodium
  REQUIRED_VARS Sodium_LIBRARY Sodium_INCLUDE_DIR
  VERSION_VAR Sodium_VERSION
  REASON_FAILURE_MESSAGE "On Debian and Ubuntu: apt-get install libsodium-dev")
mark_as_advanced(Sodium_INCLUDE_DIR Sodium_LIBRARY)

if(Sodium_FOUND AND NOT TARGET Sodium::sodium)
  add_library(Sodium::sodium UNKNOWN IMPORTED)
  set_target_properties(Sodium::sodium PROPERTIES
    IMPORTED_LOCATION "${Sodium_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${Sodium_INCLUDE_DIR}")
endif()
