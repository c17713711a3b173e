# The libraries for one TensorFlow: its ops, and what XLA makes of them.

# The TensorFlow that is installed, as "2.21=/path/of/tensorflow".
function(find_tensorflow result)
  # The package is located without importing it: an import takes seconds.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m, importlib.util as u, os
name = m.packages_distributions()['tensorflow'][0]
version = '.'.join(m.version(name).split('.')[:2])
print(version + '=' + os.path.dirname(u.find_spec('tensorflow').origin), end='')"
    OUTPUT_VARIABLE tf RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "TensorFlow was not found in the environment of ${Python_EXECUTABLE}. 'pip install tensorflow' "
                        "there, or build the core alone with -DHVD_TENSORFLOW=OFF.")
  endif()
  set(${result} "${tf}" PARENT_SCOPE)
endfunction()

function(add_tensorflow version tf_dir)
  set(folder "native/tf${version}")
  set(build_dir "${CMAKE_CURRENT_BINARY_DIR}/tf${version}")
  # As given by tf.sysconfig.get_compile_flags() and get_link_flags().
  set(definitions _GLIBCXX_USE_CXX11_ABI=1 EIGEN_MAX_ALIGN_BYTES=64 NDEBUG)
  set(ops hvd_tensorflow_${version})
  add_library(${ops} SHARED tensorflow/request_of_node.cc tensorflow/kernels.cc tensorflow/ops.cc
    tensorflow/records.cc tensorflow/same.cc)
  target_include_directories(${ops} SYSTEM PRIVATE "${tf_dir}/include")
  target_compile_definitions(${ops} PRIVATE ${definitions})
  target_compile_options(${ops} PRIVATE ${HVD_WARNINGS})
  target_link_libraries(${ops} PRIVATE hvd_core "${tf_dir}/libtensorflow_framework.so.2")
  # As one: their time is that of TensorFlow's headers.
  set_target_properties(${ops} PROPERTIES UNITY_BUILD ON
    OUTPUT_NAME hvd_tensorflow LIBRARY_OUTPUT_DIRECTORY "${build_dir}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${ops} LIBRARY DESTINATION hvd_keras/${folder})

  # Models train without XLA, too. Older wheels have no or less complete headers for XLA's calls.
  if(version VERSION_LESS 2.21 OR NOT EXISTS "${tf_dir}/libtensorflow_cc.so.2" OR NOT EXISTS "${tf_dir}/include/xla/ffi/api/ffi.h")
    message(STATUS "TensorFlow ${version} has no C++ interface to XLA's calls: libhvd_xla.so is left out, models train without XLA.")
    return()
  endif()
  set(interface tensorflow_xla_${version})
  add_library(${interface} INTERFACE)
  # XLA's headers include two libraries by their own paths, which are no part of get_compile_flags().
  target_include_directories(${interface} SYSTEM INTERFACE "${tf_dir}/include"
    "${tf_dir}/include/external/highwayhash" "${tf_dir}/include/external/farmhash_archive/src")
  target_compile_definitions(${interface} INTERFACE ${definitions})
  # g++ finds fault with moves of absl's containers, when it has inlined them.
  target_compile_options(${interface} INTERFACE ${HVD_WARNINGS} -Wno-maybe-uninitialized)
  target_link_options(${interface} INTERFACE LINKER:--no-undefined)
  target_link_libraries(${interface} INTERFACE
    "${tf_dir}/libtensorflow_framework.so.2" "${tf_dir}/libtensorflow_cc.so.2")
  set(xla hvd_xla_${version})
  add_library(${xla} SHARED tensorflow/request_of_node.cc xla/handlers.cc xla/kernels.cc)
  target_link_libraries(${xla} PRIVATE hvd_core ${interface})
  set_target_properties(${xla} PROPERTIES
    OUTPUT_NAME hvd_xla LIBRARY_OUTPUT_DIRECTORY "${build_dir}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${xla} LIBRARY DESTINATION hvd_keras/${folder})
endfunction()
