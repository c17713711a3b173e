# The build writes the module itself: native/build_info.py.in.
TENSORFLOW_VERSION: str
MPIRUN: str
