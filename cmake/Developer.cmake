# Settings for work on regrad itself; a project that includes regrad keeps its own.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_EXTENSIONS OFF)

find_program(REGRAD_CCACHE ccache)
mark_as_advanced(REGRAD_CCACHE)
if(REGRAD_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without these, ccache refuses whatever is compiled with a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${REGRAD_CCACHE})
endif()

foreach(linker IN ITEMS mold lld)
  find_program(REGRAD_LD_${linker} ld.${linker})
  mark_as_advanced(REGRAD_LD_${linker})
  if(REGRAD_LD_${linker})
    add_link_options(-fuse-ld=${linker})
    break()
  endif()
endforeach()

add_compile_options(-Wall -Wextra -Wpedantic -Wconversion)
