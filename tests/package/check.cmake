# Tests regrad as a package: cmake -D CHECK=<name of a check below> -D ... -P check.cmake. tests/CMakeLists.txt passes:
#   REGRAD_SOURCE, REGRAD_BUILD   regrad's source and build folders
#   WORK                          a folder of this check's own
#   TORCH_DIR, TORCH_MINOR        where REGRAD_BUILD's Torch is, and its major.minor
#   SETTINGS                      the generator and compiler, as arguments to cmake
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Configures the consumer, builds its given programs and runs them.
function(consume name programs)
  set(build "${WORK}/${name}")
  run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" ${SETTINGS} "-DTorch_DIR=${TORCH_DIR}" ${ARGN})
  run("${CMAKE_COMMAND}" --build "${build}" --target ${programs})
  foreach(program IN LISTS programs)
    run("${build}/${program}")
  endforeach()
endfunction()

function(install_regrad)
  run("${CMAKE_COMMAND}" --install "${REGRAD_BUILD}" --prefix "${WORK}/prefix")
endfunction()

# Sets <result> to the one block of README.md that is fenced as <language>.
function(readme_block language result)
  file(READ "${REGRAD_SOURCE}/README.md" readme)
  set(fence "```${language}\n")
  string(LENGTH "${fence}" fence_length)
  string(FIND "${readme}" "${fence}" start)
  string(FIND "${readme}" "${fence}" last_start REVERSE)
  if(start EQUAL -1 OR NOT start EQUAL last_start)
    message(FATAL_ERROR "README.md must have one block that starts with ```${language}")
  endif()
  math(EXPR start "${start} + ${fence_length}")
  string(SUBSTRING "${readme}" ${start} -1 block)
  string(FIND "${block}" "```" end)
  string(SUBSTRING "${block}" 0 ${end} block)
  set(${result} "${block}" PARENT_SCOPE)
endfunction()

# Sets <result> to the folder of a Torch package that has a version and nothing else.
function(fake_torch version result)
  set(folder "${WORK}/torch-${version}")
  file(WRITE "${folder}/TorchConfig.cmake" "")
  # As Torch's own version file does, it accepts every request that is not newer.
  file(WRITE "${folder}/TorchConfigVersion.cmake"
    "set(PACKAGE_VERSION ${version})\n"
    "if(NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)\n"
    "  set(PACKAGE_VERSION_COMPATIBLE TRUE)\n"
    "endif()\n")
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# Checks that a configuration with a fake Torch fails, and says which one it found and what it needs.
function(expect_refusal source version needed)
  fake_torch("${version}" folder)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${source}" -B "${WORK}/with-${version}" ${SETTINGS} "-DTorch_DIR=${folder}" ${ARGN}
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  message("${output}")
  foreach(text IN ITEMS "Found: ${version} at ${folder}" "Needed: ${needed}" "What to do: ")
    string(FIND "${output}" "${text}" position)
    if(status EQUAL 0 OR position EQUAL -1)
      message(FATAL_ERROR "Torch ${version} must be refused with a message that has '${text}'; status ${status}")
    endif()
  endforeach()
endfunction()

# --- The checks ---------------------------------------------------------------------------------------------------------

function(check_installed)
  install_regrad()
  set(settings -DREGRAD_FROM=package "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
  consume(no_build_type consumer ${settings})
  consume(debug consumer ${settings} -DCMAKE_BUILD_TYPE=Debug)
endfunction()

function(check_build_tree)
  consume(build consumer -DREGRAD_FROM=package "-Dregrad_DIR=${REGRAD_BUILD}/cmake")
endfunction()

# What README.md shows: its program is examples/quickstart.cpp, and with its CMakeLists.txt prints what it says, up to numbers.
function(check_readme)
  readme_block(cpp program)
  file(READ "${REGRAD_SOURCE}/examples/quickstart.cpp" example)
  if(NOT program STREQUAL example)
    message(FATAL_ERROR "README.md shows another program than examples/quickstart.cpp")
  endif()
  readme_block(cmake lists)
  set(source "${WORK}/source")
  file(WRITE "${source}/quickstart.cpp" "${program}")
  file(WRITE "${source}/CMakeLists.txt" "${lists}")

  install_regrad()
  run("${CMAKE_COMMAND}" -S "${source}" -B "${WORK}/build" ${SETTINGS} "-DTorch_DIR=${TORCH_DIR}"
    "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
  run("${CMAKE_COMMAND}" --build "${WORK}/build")
  execute_process(COMMAND "${WORK}/build/quickstart" OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  readme_block(text shown)
  foreach(output IN ITEMS printed shown)
    message("${output}:\n${${output}}")
    string(REGEX REPLACE "[0-9]+" "0" ${output} "${${output}}")
  endforeach()
  if(NOT printed STREQUAL shown)
    message(FATAL_ERROR "README.md shows another output than its program prints")
  endif()
endfunction()

# The next two compile regrad as it is not compiled elsewhere: shared, so that a missing REGRAD_EXPORT shows, and without a
# build type, so that NDEBUG is not defined.
function(check_subdirectory)
  consume(build "consumer;quickstart" -DREGRAD_FROM=subdirectory "-DREGRAD_SOURCE=${REGRAD_SOURCE}" -DBUILD_SHARED_LIBS=ON)
endfunction()

function(check_fetch_content)
  consume(build "consumer;quickstart" -DREGRAD_FROM=fetch_content "-DREGRAD_SOURCE=${REGRAD_SOURCE}" -DBUILD_SHARED_LIBS=ON)
endfunction()

function(check_too_old_torch)
  expect_refusal("${REGRAD_SOURCE}" 2.6.9 "at least 2.7 and below 3")
endfunction()

function(check_too_new_torch)
  expect_refusal("${REGRAD_SOURCE}" 3.0.0 "at least 2.7 and below 3")
endfunction()

function(check_other_torch_than_built_with)
  install_regrad()
  foreach(version IN ITEMS 2.6.9 2.99.0)
    expect_refusal("${CMAKE_CURRENT_LIST_DIR}" ${version} "${TORCH_MINOR}.x, the release that this regrad was built with"
      -DREGRAD_FROM=package "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
  endforeach()
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(ENV{CCACHE_BASEDIR} "${WORK}") # two checks then find each other's results
cmake_language(CALL "check_${CHECK}")
