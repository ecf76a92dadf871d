# What tests, examples and applications share.

# regrad_runnable_torch: what a program of ours links beside regrad. It is `torch`, which brings the CUDA kernels in, where
# that can be loaded; with a CUDA-built Torch whose CUDA libraries are not installed, the CPU part is all there is.
if(NOT REGRAD_TORCH_LOADS_ASKED_OF STREQUAL Torch_DIR)
  message(CHECK_START "Whether programs can load all of Torch ${TORCH_FOUND_VERSION}")
  file(WRITE "${PROJECT_BINARY_DIR}/torch_loads.cpp" "int main() {}\n")
  get_target_property(torch_file torch LOCATION)
  try_run(exit_status links
    "${PROJECT_BINARY_DIR}/torch_loads" "${PROJECT_BINARY_DIR}/torch_loads.cpp"
    LINK_OPTIONS -Wl,--no-as-needed -Wl,--allow-shlib-undefined
    LINK_LIBRARIES "${torch_file}"
    RUN_OUTPUT_VARIABLE output)
  if(links AND exit_status EQUAL 0)
    message(CHECK_PASS "yes")
    set(loads TRUE)
  else()
    message(CHECK_FAIL "no: CPU only")
    set(loads FALSE)
  endif()
  set(REGRAD_TORCH_LOADS ${loads} CACHE INTERNAL "")
  set(REGRAD_TORCH_LOADS_ASKED_OF "${Torch_DIR}" CACHE INTERNAL "")
endif()

add_library(regrad_runnable_torch INTERFACE)
if(REGRAD_TORCH_LOADS)
  target_link_libraries(regrad_runnable_torch INTERFACE torch torch_library)
endif()
