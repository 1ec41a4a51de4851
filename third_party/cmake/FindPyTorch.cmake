# SPDX-License-Identifier: Apache-2.0
#[[
Finds the PyTorch that a Python interpreter would import, by asking that interpreter.

find_package(Torch) is not used: with a CUDA build of torch it insists on a complete CUDA toolkit, adds compile flags of
its own and links every CUDA library, none of which penstock needs to compile.

Needs  Python_EXECUTABLE, or PyTorch_ROOT: the folder of a LibTorch without Python, which has include and lib.
Gives  PyTorch::torch   c10, torch_cpu and torch, with torch's headers as system headers
       PyTorch::python  the above with torch_python; for the bindings alone
       PyTorch::pybind11  the headers of the pybind11 that torch brings, and none of torch's: nothing is linked
       PyTorch::cuda    c10_cuda, torch_cuda and the cudart that torch itself loads; only with a CUDA build of torch and
                        a CUDA toolkit of the same major version, whose headers it takes
       PyTorch_VERSION, PyTorch_VERSION_MINOR ("2.11"), PyTorch_LIBRARY_DIR, PyTorch_INCLUDE_DIR
       PyTorch_CUDA_VERSION ("13.0", or empty for a CPU build), PyTorch_NVCC (the compiler of that toolkit)
]]

# Torch is not imported: that takes seconds, and a torch whose CUDA libraries are not installed would do to compile with.
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/PenstockTorch.cmake")
if(PyTorch_ROOT)
  penstock_read_torch("${PyTorch_ROOT}" PENSTOCK_PYTORCH)
  set(_pytorch_status 1)
  set(_pytorch_error "there are no headers of torch in ${PyTorch_ROOT}")
  if(PENSTOCK_PYTORCH_VERSION)
    set(_pytorch_status 0)
    set(_pytorch_folder "${PyTorch_ROOT}")
    set(PENSTOCK_PYTORCH_LIBRARY_DIRS "${PyTorch_ROOT}/lib")
    set(PENSTOCK_PYTORCH_CUDA_VERSION "")
    if(EXISTS "${PyTorch_ROOT}/lib/libtorch_cuda.so")
      find_package(CUDAToolkit QUIET)
      set(PENSTOCK_PYTORCH_CUDA_VERSION "${CUDAToolkit_VERSION}")
    endif()
  endif()
else()
  # The lines of the answer: the folder, the version of CUDA, and where the libraries of CUDA may be.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c [[
import glob, importlib.util, os, sys
spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None: sys.exit("no module named torch")
folder = os.path.dirname(spec.origin)
facts = {}
with open(os.path.join(folder, "version.py")) as file: exec(file.read(), facts)
nvidia = os.path.join(os.path.dirname(folder), "nvidia")
libraries = [os.path.join(folder, "lib")] + sorted(glob.glob(os.path.join(nvidia, "*", "lib")))
print(folder, facts.get("cuda") or "", "|".join(libraries), sep="\n", end="")
]]
    OUTPUT_VARIABLE _pytorch_answer
    RESULT_VARIABLE _pytorch_status
    ERROR_VARIABLE _pytorch_error
    ERROR_STRIP_TRAILING_WHITESPACE)
  if(_pytorch_status EQUAL 0)
    string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n(.*)$" _pytorch_answer "${_pytorch_answer}")
    set(_pytorch_folder "${CMAKE_MATCH_1}")
    set(PENSTOCK_PYTORCH_CUDA_VERSION "${CMAKE_MATCH_2}")
    string(REPLACE "|" ";" PENSTOCK_PYTORCH_LIBRARY_DIRS "${CMAKE_MATCH_3}")
    penstock_read_torch("${_pytorch_folder}" PENSTOCK_PYTORCH)
    if(NOT PENSTOCK_PYTORCH_VERSION)
      set(_pytorch_status 1)
      set(_pytorch_error "${_pytorch_folder} has no headers of torch")
    endif()
  endif()
  if(NOT _pytorch_status EQUAL 0)
    set(PyTorch_NOT_FOUND_MESSAGE
        "${Python_EXECUTABLE} has no torch (${_pytorch_error}). penstock is built against an installed PyTorch: install it \
into that Python and build with `pip install --no-build-isolation .`, or have pip fetch one with `pip install .`")
  endif()
endif()

if(NOT _pytorch_status EQUAL 0 AND PyTorch_ROOT)
  set(PyTorch_NOT_FOUND_MESSAGE "PyTorch_ROOT is ${PyTorch_ROOT}: ${_pytorch_error}")
endif()
if(_pytorch_status EQUAL 0)
  set(PyTorch_VERSION "${PENSTOCK_PYTORCH_VERSION}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" PyTorch_VERSION_MINOR "${PyTorch_VERSION}")
  set(PyTorch_INCLUDE_DIR "${_pytorch_folder}/include")
  set(PyTorch_LIBRARY_DIR "${_pytorch_folder}/lib")
  set(PyTorch_LIBRARY_DIRS "${PENSTOCK_PYTORCH_LIBRARY_DIRS}")
  set(PyTorch_CUDA_VERSION "${PENSTOCK_PYTORCH_CUDA_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  PyTorch
  REQUIRED_VARS PyTorch_LIBRARY_DIR PyTorch_INCLUDE_DIR
  VERSION_VAR PyTorch_VERSION
  REASON_FAILURE_MESSAGE "${PyTorch_NOT_FOUND_MESSAGE}")

if(PyTorch_FOUND AND NOT TARGET PyTorch::torch)
  foreach(_library c10 torch_cpu torch torch_python)
    add_library(PyTorch::lib${_library} SHARED IMPORTED GLOBAL)
    set_target_properties(PyTorch::lib${_library} PROPERTIES
      IMPORTED_LOCATION "${PyTorch_LIBRARY_DIR}/lib${_library}.so")
  endforeach()

  # Imported targets' includes are system includes, so -Werror does not reach torch's headers.
  add_library(PyTorch::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(PyTorch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${PyTorch_INCLUDE_DIR};${PyTorch_INCLUDE_DIR}/torch/csrc/api/include"
    # The version is there so that another torch changes every command line, and everything is compiled again.
    INTERFACE_COMPILE_DEFINITIONS
      "_GLIBCXX_USE_CXX11_ABI=${PENSTOCK_PYTORCH_CXX11_ABI};PENSTOCK_BUILT_FOR_TORCH=\"${PyTorch_VERSION}\""
    INTERFACE_LINK_LIBRARIES "PyTorch::libtorch;PyTorch::libtorch_cpu;PyTorch::libc10")

  add_library(PyTorch::python INTERFACE IMPORTED GLOBAL)
  set_target_properties(PyTorch::python PROPERTIES
    INTERFACE_LINK_LIBRARIES "PyTorch::libtorch_python;PyTorch::torch")

  # They lie in the folder of torch's own headers. A folder that has nothing but a link to them keeps those out of reach.
  set(_pybind11_folder "${PROJECT_BINARY_DIR}/pybind11-headers")
  file(MAKE_DIRECTORY "${_pybind11_folder}")
  file(CREATE_LINK "${PyTorch_INCLUDE_DIR}/pybind11" "${_pybind11_folder}/pybind11" SYMBOLIC)
  add_library(PyTorch::pybind11 INTERFACE IMPORTED GLOBAL)
  set_target_properties(PyTorch::pybind11 PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_pybind11_folder}")
endif()

if(PyTorch_FOUND AND PyTorch_CUDA_VERSION AND NOT TARGET PyTorch::cuda)
  # Torch brings its own cudart, in its own folder or in a wheel of nvidia's. A second one in the process would have its own
  # idea of the current device, so exactly that file is linked.
  set(_cudart)
  foreach(_folder ${PyTorch_LIBRARY_DIRS})
    file(GLOB _found "${_folder}/libcudart*.so*")
    list(APPEND _cudart ${_found})
  endforeach()
  list(APPEND _cudart PyTorch_NO_CUDART)
  list(GET _cudart 0 PyTorch_CUDART)

  string(REGEX MATCH "^[0-9]+" _cuda_major "${PyTorch_CUDA_VERSION}")
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    message(STATUS "Without CUDA: torch is built for CUDA ${PyTorch_CUDA_VERSION}, but there is no CUDA toolkit (nvcc)")
  elseif(NOT CUDAToolkit_VERSION_MAJOR EQUAL _cuda_major)
    message(STATUS "Without CUDA: torch is built for CUDA ${PyTorch_CUDA_VERSION}, nvcc is ${CUDAToolkit_VERSION}")
  elseif(NOT EXISTS "${PyTorch_CUDART}")
    message(STATUS "Without CUDA: found no libcudart in ${PyTorch_LIBRARY_DIRS}")
  else()
    set(PyTorch_NVCC "${CUDAToolkit_NVCC_EXECUTABLE}")
    foreach(_library c10_cuda torch_cuda)
      add_library(PyTorch::lib${_library} SHARED IMPORTED GLOBAL)
      set_target_properties(PyTorch::lib${_library} PROPERTIES
        IMPORTED_LOCATION "${PyTorch_LIBRARY_DIR}/lib${_library}.so")
    endforeach()
    add_library(PyTorch::libcudart SHARED IMPORTED GLOBAL)
    set_target_properties(PyTorch::libcudart PROPERTIES IMPORTED_LOCATION "${PyTorch_CUDART}")
    add_library(PyTorch::cuda INTERFACE IMPORTED GLOBAL)
    set_target_properties(PyTorch::cuda PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}"
      INTERFACE_LINK_LIBRARIES "PyTorch::libtorch_cuda;PyTorch::libc10_cuda;PyTorch::libcudart;PyTorch::torch")
  endif()
endif()
