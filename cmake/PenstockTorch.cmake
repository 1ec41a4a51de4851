# SPDX-License-Identifier: Apache-2.0
#[[
Which torch a folder has. Installed beside PenstockConfig.cmake, which uses it.

  penstock_read_torch(<root> <prefix>)  sets <prefix>_VERSION ("2.11.0", empty if there is no torch in the folder) and
                                        <prefix>_CXX11_ABI (1 or 0), from the headers and the settings of that torch
]]
function(penstock_read_torch root prefix)
  set(version "")
  foreach(header include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(EXISTS "${root}/${header}" AND NOT version)
      file(READ "${root}/${header}" text)
      if(text MATCHES "TORCH_VERSION_MAJOR ([0-9]+).*TORCH_VERSION_MINOR ([0-9]+).*TORCH_VERSION_PATCH ([0-9]+)")
        set(version "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
      endif()
    endif()
  endforeach()
  set(abi 1)  # of every torch that does not say otherwise
  if(EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake")
    file(READ "${root}/share/cmake/Torch/TorchConfig.cmake" text)
    if(text MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
      set(abi 0)
    endif()
  endif()
  set(${prefix}_VERSION "${version}" PARENT_SCOPE)
  set(${prefix}_CXX11_ABI "${abi}" PARENT_SCOPE)
endfunction()
