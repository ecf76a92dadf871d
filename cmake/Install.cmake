include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# The folder of a Torch outside the system paths goes into the run path of a shared regrad.
set_target_properties(regrad PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/regrad")
set(build_package_dir "${PROJECT_BINARY_DIR}/cmake")

install(TARGETS regrad EXPORT regradTargets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/regrad" "${PROJECT_BINARY_DIR}/include/regrad"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")
install(EXPORT regradTargets NAMESPACE regrad:: DESTINATION "${package_dir}")

# The package refuses a Torch of another major.minor: LibTorch keeps no binary compatibility between these.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" REGRAD_TORCH_MINOR "${TORCH_FOUND_VERSION}")
configure_package_config_file(cmake/regradConfig.cmake.in "${build_package_dir}/regradConfig.cmake"
  INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${build_package_dir}/regradConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${build_package_dir}/regradConfig.cmake"
  "${build_package_dir}/regradConfigVersion.cmake"
  cmake/RegradTorch.cmake
  DESTINATION "${package_dir}")

# With regrad_DIR=<build>/cmake, a build tree serves as a package too.
export(EXPORT regradTargets NAMESPACE regrad:: FILE "${build_package_dir}/regradTargets.cmake")
configure_file(cmake/RegradTorch.cmake "${build_package_dir}/RegradTorch.cmake" COPYONLY)
