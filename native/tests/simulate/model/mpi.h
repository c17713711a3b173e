// MPI as far as the core uses it between hosts, over the simulated network (network.cc).
#pragma once

#include <cstdint>

using MPI_Comm = int;
using MPI_Datatype = int;  // the number of bytes, and what they are
using MPI_Op = int;
using MPI_Info = int;
using MPI_Request = struct SimulatedRequest*;
struct MPI_Status {
  int MPI_SOURCE, MPI_TAG, bytes;
};
using MPI_User_function = void(void* in, void* inout, int* count, MPI_Datatype* type);

constexpr MPI_Comm MPI_COMM_NULL = -1, MPI_COMM_WORLD = 0;
constexpr MPI_Datatype MPI_BYTE = 1, MPI_CHAR = 1, MPI_INT = 4, MPI_UINT64_T = 8, MPI_DOUBLE = 264;
constexpr MPI_Op MPI_MAX = 0, MPI_MIN = 1, MPI_BOR = 2;
constexpr MPI_Request MPI_REQUEST_NULL = nullptr;
constexpr MPI_Status* MPI_STATUS_IGNORE = nullptr;
constexpr MPI_Status* MPI_STATUSES_IGNORE = nullptr;
inline const char kInPlace = 0;
#define MPI_IN_PLACE static_cast<const void*>(&kInPlace)
constexpr int MPI_SUCCESS = 0, MPI_ERR_OTHER = 15, MPI_UNDEFINED = -32766;
constexpr int MPI_ANY_SOURCE = -1, MPI_ANY_TAG = -1;
constexpr int MPI_MAX_ERROR_STRING = 64, MPI_MAX_PROCESSOR_NAME = 64;

int MPI_Abort(MPI_Comm comm, int code);
int MPI_Error_string(int code, char* text, int* length);
int MPI_Get_processor_name(char* name, int* length);

int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* copy);
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part);
int MPI_Comm_free(MPI_Comm* comm);
int MPI_Type_contiguous(int count, MPI_Datatype of, MPI_Datatype* type);
int MPI_Type_commit(MPI_Datatype* type);
int MPI_Type_free(MPI_Datatype* type);
int MPI_Op_create(MPI_User_function* function, int commutes, MPI_Op* op);
int MPI_Op_free(MPI_Op* op);

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request);
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request* request);
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int* found, MPI_Status* status);
int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* count);

int MPI_Testall(int count, MPI_Request* requests, int* done, MPI_Status* statuses);
int MPI_Testsome(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses);
int MPI_Waitall(int count, MPI_Request* requests, MPI_Status* statuses);

int MPI_Iallreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request* request);
int MPI_Iallgather(const void* in, int count, MPI_Datatype type, void* out, int each,
                   MPI_Datatype of, MPI_Comm comm, MPI_Request* request);
int MPI_Iallgatherv(const void* in, int count, MPI_Datatype type, void* out, const int* counts,
                    const int* starts, MPI_Datatype of, MPI_Comm comm, MPI_Request* request);
int MPI_Ialltoall(const void* in, int count, MPI_Datatype type, void* out, int each,
                  MPI_Datatype of, MPI_Comm comm, MPI_Request* request);
int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request);
int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm);
int MPI_Allgather(const void* in, int count, MPI_Datatype type, void* out, int each,
                  MPI_Datatype of, MPI_Comm comm);
int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm);
int MPI_Barrier(MPI_Comm comm);
