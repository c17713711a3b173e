# The build writes the module itself: native/build_info.py.in.
MPI_LIBRARY: str
