# Finds LibTorch for regrad. The build and the installed package share this file.
include_guard(GLOBAL)

# regrad_find_torch(<version> <problem_variable> [EXACT_MINOR])
#
# Makes the targets torch, torch_cpu and c10 globally visible, from a Torch that is at least <version> and below the next
# major version; with EXACT_MINOR from one with <version>'s own major.minor. Where none is found, <problem_variable> is set
# to text that says what was found, what is needed and what to do; otherwise it is empty. TORCH_FOUND_VERSION is set in the
# caller's scope.
#
# Looks, in this order, at: targets that the calling project has already, Torch_DIR and CMAKE_PREFIX_PATH and CMake's usual
# places, and the Torch that python3 would import.
#
# A function, so that the many variables that Torch's package sets stay out of the project that uses regrad.
function(regrad_find_torch needed problem_variable)
  cmake_parse_arguments(PARSE_ARGV 2 arg "EXACT_MINOR" "" "")
  regrad_without_cuda_toolkit()
  # Torch's package warns that it cannot find this one, which wheels have inside libtorch_cpu. Only TORCH_LIBRARIES would
  # name it, and that is not used here.
  set(kineto_LIBRARY torch_cpu)

  # A Torch_DIR is an order, not a hint: where it does not fit, no other place is tried.
  set(only_there "")
  set(asked_for "$ENV{Torch_DIR}")
  if(Torch_DIR)
    set(asked_for "${Torch_DIR}")
  endif()
  if(asked_for)
    set(only_there NO_DEFAULT_PATH PATHS "${asked_for}")
  endif()

  # Asking for a version makes CMake pass over older packages without loading them.
  find_package(Torch ${needed} QUIET GLOBAL ${only_there})
  set(seen_configs "${Torch_CONSIDERED_CONFIGS}")
  set(seen_versions "${Torch_CONSIDERED_VERSIONS}")
  if(NOT Torch_FOUND AND NOT only_there)
    regrad_torch_folder_of_python(python_folder)
    if(python_folder)
      find_package(Torch ${needed} QUIET GLOBAL NO_DEFAULT_PATH PATHS "${python_folder}")
      list(APPEND seen_configs ${Torch_CONSIDERED_CONFIGS})
      list(APPEND seen_versions ${Torch_CONSIDERED_VERSIONS})
    endif()
  endif()

  string(REGEX MATCH "^[0-9]+\\.[0-9]+" needed_minor "${needed}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found_minor "${Torch_VERSION}")
  string(REGEX MATCH "^[0-9]+" needed_major "${needed}")
  math(EXPR next_major "${needed_major} + 1")

  if(arg_EXACT_MINOR)
    set(range "${needed_minor}.x, the release that this regrad was built with")
    set(advice "Point CMAKE_PREFIX_PATH or Torch_DIR to a LibTorch ${needed_minor}, or build regrad again with the LibTorch that you use")
  else()
    set(range "at least ${needed} and below ${next_major}")
    set(advice "Point CMAKE_PREFIX_PATH or Torch_DIR to such a LibTorch, for instance to what `python3 -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints after `pip install torch`")
  endif()

  set(found "")
  if(NOT Torch_FOUND)
    set(found "none")
    if(asked_for)
      string(APPEND found " at Torch_DIR, ${asked_for}")
    endif()
    set(refused "")
    foreach(config version IN ZIP_LISTS seen_configs seen_versions)
      list(APPEND refused "${version} at ${config}")
    endforeach()
    if(refused)
      list(REMOVE_DUPLICATES refused)
      list(JOIN refused ", " found)
    endif()
  elseif((arg_EXACT_MINOR AND NOT found_minor VERSION_EQUAL needed_minor) OR Torch_VERSION VERSION_GREATER_EQUAL next_major)
    set(found "${Torch_VERSION} at ${Torch_DIR}")
  endif()

  if(found)
    set(${problem_variable} "regrad: no suitable LibTorch.\n  Found: ${found}\n  Needed: ${range}\n  What to do: ${advice}." PARENT_SCOPE)
  else()
    set(${problem_variable} "" PARENT_SCOPE)
    if(NOT ${CMAKE_FIND_PACKAGE_NAME}_FIND_QUIETLY)
      message(STATUS "Found LibTorch ${Torch_VERSION}: ${Torch_DIR}")
    endif()
  endif()
  set(TORCH_FOUND_VERSION "${Torch_VERSION}" PARENT_SCOPE)
endfunction()

# Torch's package for a CUDA build looks for the CUDA toolkit, enables the CUDA language, and stops where there is none. It
# skips all of that where a target torch::cudart exists. regrad needs no toolkit, so it takes that way on every machine: one
# with a toolkit then behaves like one without. A project that compiles CUDA code of its own calls find_package(Torch)
# before it calls for regrad; this changes nothing then.
function(regrad_without_cuda_toolkit)
  if(NOT TARGET torch_cpu AND NOT TARGET torch::cudart)
    add_library(torch::cudart INTERFACE IMPORTED GLOBAL)
  endif()
endfunction()

# Sets <result> to torch.utils.cmake_prefix_path of the Torch that python3 would import, or to "". An import would take
# seconds, and would fail where a CUDA library is missing that C++ programs need not have.
function(regrad_torch_folder_of_python result)
  execute_process(
    COMMAND python3 -c
      "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0] + '/share/cmake')"
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET)
  if(NOT IS_DIRECTORY "${folder}")
    set(folder "")
  endif()
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()
