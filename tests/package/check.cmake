# Tests regrad as a package: cmake -D CHECK=<name of a check below> -D ... -P check.cmake. tests/CMakeLists.txt passes:
#   REGRAD_SOURCE, REGRAD_BUILD   regrad's source and build folders
#   WORK                          a folder of this check's own
#   TORCH_DIR, TORCH_MINOR        where REGRAD_BUILD's Torch is, and its major.minor
#   SETTINGS                      the generator and compiler, as arguments to cmake
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Configures, builds and runs the consumer.
function(consume name)
  set(build "${WORK}/${name}")
  run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" ${SETTINGS} "-DTorch_DIR=${TORCH_DIR}" ${ARGN})
  run("${CMAKE_COMMAND}" --build "${build}" --target consumer)
  run("${build}/consumer")
endfunction()

function(install_regrad)
  run("${CMAKE_COMMAND}" --install "${REGRAD_BUILD}" --prefix "${WORK}/prefix")
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
  consume(no_build_type ${settings})
  consume(debug ${settings} -DCMAKE_BUILD_TYPE=Debug)
endfunction()

function(check_build_tree)
  consume(build -DREGRAD_FROM=package "-Dregrad_DIR=${REGRAD_BUILD}/cmake")
endfunction()

# The next two compile regrad as it is not compiled elsewhere: shared, so that a missing REGRAD_EXPORT shows, and without a
# build type, so that NDEBUG is not defined.
function(check_subdirectory)
  consume(build -DREGRAD_FROM=subdirectory "-DREGRAD_SOURCE=${REGRAD_SOURCE}" -DBUILD_SHARED_LIBS=ON)
endfunction()

function(check_fetch_content)
  consume(build -DREGRAD_FROM=fetch_content "-DREGRAD_SOURCE=${REGRAD_SOURCE}" -DBUILD_SHARED_LIBS=ON)
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
