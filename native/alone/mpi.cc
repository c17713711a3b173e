// An MPI of one process, for a job of one rank where no MPI is installed
// (hvd_keras/runtime/libraries.py):
// what the core calls when it is alone. Communicators, groups, types and requests are never looked
// at.
#include <mpi.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>

#ifdef OPEN_MPI  // its handles are the addresses of these
#define HANDLES(kind, ...)              \
  struct ompi_predefined_##kind##_t {}; \
  ompi_predefined_##kind##_t __VA_ARGS__;
HANDLES(communicator, ompi_mpi_comm_world, ompi_mpi_comm_null)
HANDLES(errhandler, ompi_mpi_errors_return)
HANDLES(info, ompi_mpi_info_null)
HANDLES(request, ompi_request_null)
HANDLES(op, ompi_mpi_op_bor, ompi_mpi_op_max, ompi_mpi_op_min)
HANDLES(datatype, ompi_mpi_byte, ompi_mpi_char, ompi_mpi_double, ompi_mpi_int)
#endif

// Functions that have nothing to do, and functions between several ranks. Under another name, mpi.h
// does not insist on their parameters.
#define DEFINE(name, body)                             \
  extern "C" int alone_##name() __asm__("MPI_" #name); \
  int alone_##name() body
#define NOTHING(name) DEFINE(name, { return MPI_SUCCESS; })
#define NEVER(name) DEFINE(name, { std::abort(); })
NOTHING(Allreduce)  // in place
NOTHING(Barrier)
NOTHING(Bcast)
NOTHING(Comm_create_group)
NOTHING(Comm_dup)
NOTHING(Comm_free)
NOTHING(Comm_group)
NOTHING(Comm_set_errhandler)
NOTHING(Comm_split)
NOTHING(Comm_split_type)
NOTHING(Group_free)
NOTHING(Group_incl)
NOTHING(Ibcast)
NOTHING(Waitall)
NEVER(Allgather)
NEVER(Error_string)
NEVER(Get_count)

namespace {

bool begun = false, ended = false;

int put(int value, int* out) {
  *out = value;
  return MPI_SUCCESS;
}

int copy(const void* from, int bytes, void* to) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return MPI_SUCCESS;
}

}  // namespace

extern "C" {

int MPI_Init_thread(int*, char***, int wanted, int* given) {
  begun = true;
  return put(wanted, given);
}

int MPI_Finalize() {
  ended = true;
  return MPI_SUCCESS;
}

int MPI_Abort(MPI_Comm, int status) { std::_Exit(status); }
int MPI_Initialized(int* flag) { return put(begun, flag); }
int MPI_Finalized(int* flag) { return put(ended, flag); }
int MPI_Query_thread(int* level) { return put(MPI_THREAD_MULTIPLE, level); }
int MPI_Comm_rank(MPI_Comm, int* rank) { return put(0, rank); }
int MPI_Comm_size(MPI_Comm, int* size) { return put(1, size); }
int MPI_Iprobe(int, int, MPI_Comm, int* flag, MPI_Status*) { return put(0, flag); }
int MPI_Testall(int, MPI_Request*, int* flag, MPI_Status*) { return put(1, flag); }
int MPI_Testsome(int, MPI_Request*, int* count, int*, MPI_Status*) {
  return put(MPI_UNDEFINED, count);  // no request is active: each has ended where it began
}

int MPI_Get_library_version(char* text, int* length) {
  std::strcpy(text, "none was found, and one process needs none");
  return put(static_cast<int>(std::strlen(text)), length);
}

int MPI_Get_processor_name(char* name, int* length) {
  gethostname(name, MPI_MAX_PROCESSOR_NAME);
  name[MPI_MAX_PROCESSOR_NAME - 1] = '\0';
  return put(static_cast<int>(std::strlen(name)), length);
}

// Always of bytes.
int MPI_Iallgatherv(const void* mine, int bytes, MPI_Datatype, void* all, const int*, const int*,
                    MPI_Datatype, MPI_Comm, MPI_Request*) {
  return copy(mine, bytes, all);
}

int MPI_Ialltoall(const void* mine, int bytes, MPI_Datatype, void* all, int, MPI_Datatype, MPI_Comm,
                  MPI_Request*) {
  return copy(mine, bytes, all);
}

// Pieces to itself: all are awaited before the first is sent, by the same thread.
thread_local std::deque<void*> awaited;

int MPI_Irecv(void* data, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*) {
  awaited.push_back(data);
  return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int bytes, MPI_Datatype, int, int, MPI_Comm, MPI_Request*) {
  void* const to = awaited.front();
  awaited.pop_front();
  return copy(data, bytes, to);
}
}
