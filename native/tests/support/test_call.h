// A collective as a test sees it: inputs that differ by rank, tensor and element, and a result to
// wait for.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/cluster_transport.h"
#include "core/cpu/host_transport.h"
#include "core/cpu/mpi_transport.h"
#include "core/engine/engine.h"
#include "core/gpu/gpu_transport.h"
#include "core/request/collectives.h"
#include "tests/support/check.h"
#include "tests/support/device.h"
#include "tests/support/small_floats.h"

namespace hvd::test {

inline int rank = 0;
inline int size = 1;
inline std::string transport = "mpi";
inline std::unique_ptr<Device> device;  // where the tensors are; null: in the host's memory
inline std::string why_stuck;           // why a GPU waits for what will never come

// Whether NCCL itself sums, in an order and with a precision of its own.
inline bool nccl_sums() { return device && transport == "gpu" && !device->is_fake() && size > 1; }

// Small whole numbers: sums and products over a few ranks are exact in every dtype but bool.
inline int value(int of_rank, size_t tensor, int64_t index) {
  return static_cast<int>((index * 3 + static_cast<int64_t>(tensor)) % 5) + 2 * of_rank +
         (index % 2 ? 1 : 0);
}

inline void store(DType dtype, double number, void* data, int64_t index) {
  const auto put = [&](auto stored) { static_cast<decltype(stored)*>(data)[index] = stored; };
  switch (dtype) {
    case DType::boolean:
      return put(static_cast<uint8_t>(static_cast<int>(number) % 3 == 0));
    case DType::uint8:
      return put(static_cast<uint8_t>(number));
    case DType::int8:
      return put(static_cast<int8_t>(number));
    case DType::uint16:
      return put(static_cast<uint16_t>(number));
    case DType::int16:
      return put(static_cast<int16_t>(number));
    case DType::uint32:
      return put(static_cast<uint32_t>(number));
    case DType::int32:
      return put(static_cast<int32_t>(number));
    case DType::uint64:
      return put(static_cast<uint64_t>(number));
    case DType::int64:
      return put(static_cast<int64_t>(number));
    case DType::float16:
      return put(nearest(kFloat16, number));
    case DType::bfloat16:
      return put(nearest(kBFloat16, number));
    case DType::float32:
      return put(static_cast<float>(number));
    case DType::float64:
      return put(number);
  }
}

// By name: all over MPI; one host, with or without GPUs; or as if ranks 0 and 1 were one host, 2
// and 3 another, and so on, with one of the algorithms between them. In a grid each rank is a host.
inline std::unique_ptr<Transport> new_transport(MPI_Comm communicator, std::vector<int> ranks,
                                                Settings settings = {}) {
  static const std::map<std::string, Allreduce> algorithms = {{"cluster", Allreduce::automatic},
                                                              {"grid", Allreduce::grid}};
  auto mpi = std::make_unique<MpiTransport>(communicator, std::move(ranks));
  const auto algorithm = algorithms.find(transport);
  const int local = algorithm == algorithms.end() ? size : transport == "grid" ? 1 : 2;
  const auto host_of = [&](int of_rank) { return of_rank / local; };
  std::unique_ptr<Transport> found;
  if (transport == "mpi" || mpi->size() == 1) {
    found = std::move(mpi);
  } else if (host_of(mpi->ranks().front()) == host_of(mpi->ranks().back())) {
    found = std::make_unique<HostTransport>(&mpi);
  } else {
    MPI_Comm host;
    MPI_Comm_split(communicator, host_of(rank), rank, &host);
    // What the others ask for does not count.
    const Allreduce asked = mpi->rank() == 0 ? algorithm->second : Allreduce::direct;
    found = std::make_unique<ClusterTransport>(&mpi, host, asked);
    MPI_Comm_free(&host);
  }
  if (!device) return found;
  if (transport == "gpu-host") {
    settings.gpu_operations = settings.gpu_allreduce = GpuBackend::mpi;
    settings.gpu_allgather = settings.gpu_broadcast = GpuBackend::mpi;
  }
  settings.ranks_share_gpus = device->settings().ranks_share_gpus;
  settings.cudart_library = device->settings().cudart_library;
  settings.nccl_library = device->settings().nccl_library;
  static int process_sets = 0;
  return std::make_unique<GpuTransport>(
      std::move(found), settings, [](const std::string& why) { why_stuck = why; }, process_sets++);
}

inline std::unique_ptr<Engine> new_engine(const Settings& settings = {}) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<Engine>(new_transport(MPI_COMM_WORLD, ranks, settings), settings);
}

inline Engine::LeaveResult leave(Engine& engine, const std::string& reason, double seconds) {
  engine.announce_leaving("left the job: " + reason);
  return engine.leave(seconds);
}

// Runs a test with its own engine, and leaves with all ranks.
inline void with_engine(const std::function<void(Engine&)>& body) {
  const auto engine = new_engine();
  body(*engine);
  CHECK_EQ(leave(*engine, "the test is over", -1), Engine::LeaveResult::all_left);
}

class Call {
 public:
  Call(Kind kind, std::string name) : result_(promise_.get_future()) {
    request.kind = kind;
    request.name = std::move(name);
  }

  ~Call() {
    if (device && request.stream) device->synchronize();
  }

  Call& add(DType dtype, Shape shape) {
    const size_t tensor = request.inputs.size();
    const int64_t n = elements(shape);
    inputs_.emplace_back(static_cast<size_t>(n) * size_of(dtype));
    for (int64_t i = 0; i < n; ++i) store(dtype, value(rank, tensor, i), inputs_.back().data(), i);
    request.inputs.push_back({inputs_.back().data(), dtype, std::move(shape)});
    if (device && !on_host) add_device_memory(inputs_.back().size());
    return *this;
  }

  // Instead of value().
  template <typename Term>
  void change_inputs(const Term& term) {
    for (size_t tensor = 0; tensor < inputs_.size(); ++tensor) {
      const Input& input = request.inputs[tensor];
      for (int64_t i = 0; i < elements(input.shape); ++i)
        store(input.dtype, term(rank, tensor, i), inputs_[tensor].data(), i);
    }
  }

  // For alltoall: how many rows of the tensor before go to each rank.
  Call& add_splits(const std::vector<int64_t>& rows) {
    const char* bytes = reinterpret_cast<const char*>(rows.data());
    inputs_.emplace_back(bytes, bytes + rows.size() * sizeof rows[0]);
    request.inputs.push_back(
        {inputs_.back().data(), DType::int64, {static_cast<int64_t>(rows.size())}});
    if (device) add_device_memory(0);  // none, in its place
    return *this;
  }

  template <typename T>
  const T* output(size_t index) const {
    return reinterpret_cast<const T*>(outputs[index].data());
  }

  template <typename Target>  // an engine, or the world
  void submit(Target& engine) {
    shapes.resize(request.inputs.size());
    outputs.resize(request.inputs.size());
    if (!collective(request.kind).keeps_shape) {
      if (outputs.empty()) outputs.resize(1), shapes.resize(1);  // join
      request.allocate = [this](size_t index, const Shape& shape, void** data) {
        if (refuse_memory) return Status::error(Code::internal, "no memory");
        shapes[index] = shape;
        outputs[index].assign(
            elements(shape) *
                size_of(request.inputs.empty() ? DType::int32 : request.inputs[index].dtype),
            '\x55');
        *data = outputs[index].data();
        return Status();
      };
    } else {
      for (size_t i = 0; i < request.inputs.size(); ++i) {
        outputs[i].assign(request.inputs[i].bytes(), '\x55');
        request.outputs.push_back(in_place ? inputs_[i].data() : outputs[i].data());
      }
    }
    if (device && !on_host && !request.inputs.empty()) move_to_device();
    request.done = [this](const Status& status) {
      ++times_done;
      if (then) then();
      promise_.set_value(status);
    };
    engine.submit(request);
  }

  // A collective that never ends would be killed with the whole test, and nobody knew which it was.
  Status wait() {
    if (result_.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
      std::printf("rank %d: %s is not done after 60 s; %s\n", rank, request.name.c_str(),
                  context.c_str());
      std::fflush(stdout);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    const Status status = result_.get();
    if (status.ok() && !results_.empty()) {
      for (const auto& [host, memory, bytes] : results_) device->copy(host, memory, bytes);
      device->synchronize();
    }
    return status;
  }

  void expect_ok() {
    const Status status = wait();
    CHECK_EQ(status.message, "");
    CHECK(status.ok());
    CHECK_EQ(times_done.load(), 1);
  }

  void expect_error(Code code, const std::vector<std::string>& parts) {
    const Status status = wait();
    CHECK_EQ(status.code, code);
    for (const std::string& part : parts) CHECK_CONTAINS(status.message, part);
    CHECK_EQ(times_done.load(), 1);
  }

  // By tensor.
  std::vector<std::vector<char>> results() const {
    return in_place ? std::vector<std::vector<char>>(inputs_.begin(), inputs_.end()) : outputs;
  }

  // Bit for bit; `expected` gives the number at an index of a tensor.
  template <typename Expected>
  void expect_output(const Expected& expected) {
    expect_ok();
    for (size_t tensor = 0; tensor < outputs.size(); ++tensor) {
      const DType dtype = request.inputs[tensor].dtype;
      const std::vector<char>& got = in_place ? inputs_[tensor] : outputs[tensor];
      std::vector<char> wanted(got.size());
      const int64_t n = static_cast<int64_t>(got.size() / size_of(dtype));
      for (int64_t i = 0; i < n; ++i) store(dtype, expected(tensor, i), wanted.data(), i);
      if (got == wanted) continue;
      int64_t at = 0;
      while (got[at] == wanted[at]) ++at;
      report(false, __FILE__, __LINE__,
             "rank " + std::to_string(rank) + ": " + request.name + ", tensor " +
                 std::to_string(tensor) + ", " + name_of(dtype) + ", differs from element " +
                 std::to_string(at / size_of(dtype)) + " of " + std::to_string(n));
    }
  }

  void expect_sum() {
    expect_output([](size_t tensor, int64_t index) {
      int sum = 0;
      for (int r = 0; r < size; ++r) sum += value(r, tensor, index);
      return sum;
    });
  }

  Request request;
  std::vector<Shape> shapes;  // as allocated
  std::vector<std::vector<char>> outputs;
  bool in_place = false;
  bool refuse_memory = false;
  bool on_host = false;        // although the others are on a device
  bool other_device = false;   // says so, of memory of the first
  std::function<void()> then;  // in done()
  std::atomic<int> times_done{0};

 private:
  // Memory of a tensor that is on the device, made before anything is in the stream: a real one may
  // wait for its streams when it makes some. Copies to and from the host need page-locked memory,
  // or they are no part of the stream.
  void add_device_memory(size_t bytes) {
    in_.push_back(device->allocate(bytes));
    out_.push_back(device->allocate(bytes * size));
    pinned_in_.push_back(device->pinned(bytes));
  }

  // All but splits. The inputs arrive late, and the results are fetched in the same stream.
  void move_to_device() {
    const OnDevice here(device->cuda(), device->number());
    device->delay(std::chrono::microseconds(300));
    request.device = device->number() + (other_device ? 1 : 0);
    request.stream = device->stream();
    for (size_t i = 0; i < request.inputs.size(); ++i) {
      if (is_splits(request.kind, i)) continue;
      Input& input = request.inputs[i];
      input.data = in_[i].get();
      if (!inputs_[i].empty())
        std::memcpy(pinned_in_[i].get(), inputs_[i].data(), inputs_[i].size());
      device->copy(in_[i].get(), pinned_in_[i].get(), input.bytes());
      if (request.outputs.empty()) continue;
      void* const host = request.outputs[i];
      request.outputs[i] = in_place ? in_[i].get() : out(i, input.bytes());
      results_.push_back({host, request.outputs[i], input.bytes()});
    }
    if (!request.allocate) return;
    request.allocate = [this, on_host = request.allocate](size_t index, const Shape& shape,
                                                          void** data) {
      const Status status = on_host(index, shape, data);
      if (!status.ok() || is_splits(request.kind, index)) return status;
      void* const host = *data;
      *data = out(index, outputs[index].size());
      results_.push_back({host, *data, outputs[index].size()});
      return status;
    };
  }

  // Holds 0x55, once the stream is there: the memory may be in use until then.
  void* out(size_t index, size_t bytes) {
    if (bytes > request.inputs[index].bytes() * size) out_[index] = device->allocate(bytes);
    device->fill(out_[index].get(), 0x55, bytes);
    return out_[index].get();
  }

  struct Result {
    void* host;
    void* memory;
    size_t bytes;
  };

  std::vector<Memory> in_, out_, pinned_in_;
  std::vector<Result> results_;
  std::deque<std::vector<char>> inputs_;
  std::promise<Status> promise_;
  std::future<Status> result_;
};

// main() of a test that runs under mpirun, with the name of the transport. For "gpu" and
// "gpu-host", the one without NCCL, HVD_CUDART_LIBRARY and HVD_NCCL_LIBRARY say where CUDA and
// NCCL, or their fakes, are.
inline int run_with_mpi(int argc, char** argv, const std::vector<Test>& tests = all_tests) {
  if (argc > 1) transport = argv[1];
  int level;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  CHECK_EQ(level, static_cast<int>(MPI_THREAD_MULTIPLE));
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (transport == "gpu" || transport == "gpu-host") {
    device = std::make_unique<Device>(rank);
    set_default_gpu(device->number());
  }
  int status = run(tests);
  device.reset();
  if (failures) status = 1;
  MPI_Finalize();
  return status;
}

}  // namespace hvd::test
