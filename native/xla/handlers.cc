// The custom call that replaces a collective in a program compiled by XLA: its buffers become a
// Request for the engine. XLA's thread does not wait; it gets a future that `done` completes.
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/kernel_api.h"
#include "core/request/collectives.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
const XLA_FFI_Api* GetXlaFfiApi();  // of TensorFlow; its own header cannot stand beside ffi.h
}

namespace hvd {
namespace {

namespace ffi = xla::ffi;

ffi::Error to_error(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(status.code), status.message);
}

DType to_dtype(ffi::DataType dtype) {
#define HVD_PAIR(dtype, name, bytes, type, tf, xla, ...) {ffi::xla, DType::dtype},
  static const auto* table = new std::map<ffi::DataType, DType>{HVD_DTYPES(HVD_PAIR)};
  return table->at(dtype);  // the ops' type lists hold nothing else
}

Shape to_shape(ffi::AnyBuffer::Dimensions dimensions) {
  return Shape(dimensions.begin(), dimensions.end());
}

std::string to_text(const Shape& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ",") + std::to_string(size);
  return "[" + text + "]";
}

// Allreduces that do not wait, by the memory of their tensors, from their call to hvd_wait.
class Begun {
 public:
  using Result = std::shared_future<Status>;

  static Begun& instance() {
    static auto* begun = new Begun;
    return *begun;
  }

  void add(void* tensor, const Result& result) {
    std::lock_guard<std::mutex> lock(mutex_);
    of_tensors_[tensor] = result;
  }

  Result take(void* tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = of_tensors_.find(tensor);
    if (found == of_tensors_.end()) return {};
    Result result = std::move(found->second);
    of_tensors_.erase(found);
    return result;
  }

 private:
  std::mutex mutex_;
  std::map<void*, Result> of_tensors_;
};

// A result that XLA has allocated already.
struct Result {
  Shape shape;
  void* data;
};

// The last argument and the last result are the chain, see kernels.cc.
ffi::Future submitted(const ffi::Dictionary& dictionary, int device, void* stream,
                      ffi::RemainingArgs arguments, ffi::RemainingRets returns) {
  Request request = decode_header(std::string(*dictionary.get<std::string_view>("request")));
  if (arguments.size() > 1) {  // a barrier has no tensors
    request.device = device;
    request.stream = stream;
  }
  for (size_t i = 0; i + 1 < arguments.size(); ++i) {
    const ffi::AnyBuffer input = *arguments.get<ffi::AnyBuffer>(i);
    request.inputs.push_back(
        {input.untyped_data(), to_dtype(input.element_type()), to_shape(input.dimensions())});
  }
  std::vector<Result> results;
  for (size_t i = 0; i + 1 < returns.size(); ++i) {
    ffi::Result<ffi::AnyBuffer> output = *returns.get<ffi::AnyBuffer>(i);
    results.push_back({to_shape(output->dimensions()), output->untyped_data()});
  }
  if (!request.waits && device != kOnHost) {
    auto result = std::make_shared<std::promise<Status>>();
    const Begun::Result future = result->get_future().share();
    for (size_t i = 0; i < results.size(); ++i) {
      request.outputs.push_back(results[i].data);
      if (request.inputs[i].bytes() > 0) Begun::instance().add(results[i].data, future);
    }
    request.done = [result](const Status& status) { result->set_value(status); };
    submit(std::move(request));
    ffi::Promise begun;
    begun.SetAvailable();
    return ffi::Future(begun);
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  request.done = [promise](const Status& status) mutable {
    status.ok() ? promise.SetAvailable() : promise.SetError(to_error(status));
  };
  if (collective(request.kind).keeps_shape) {
    for (const Result& result : results) request.outputs.push_back(result.data);
  } else {
    // Of an alltoall, see kernels.cc. Nobody reads those that it receives.
    const auto splits = std::make_shared<std::vector<int64_t>>();
    const auto unread = std::make_shared<std::vector<int64_t>>();
    if (request.kind == Kind::alltoall) {
      splits->assign(*dictionary.get<int64_t>("splits"), *dictionary.get<int64_t>("split_rows"));
      request.inputs.push_back(
          {splits->data(), DType::int64, {static_cast<int64_t>(splits->size())}});
    }
    request.allocate = [results = std::move(results), splits, unread, name = request.name](
                           size_t index, const Shape& shape, void** data) {
      if (index >= results.size()) {
        unread->resize(shape[0]);
        *data = unread->data();
        return Status();
      }
      if (shape != results[index].shape) {
        return Status::error(
            Code::failed_precondition,
            "'" + name + "': the ranks' tensors differ in their first dimension: the result is " +
                to_text(shape) + ", but XLA has compiled a program for " +
                to_text(results[index].shape) +
                ", as if all had as many rows as this rank. Give all ranks the same number, or "
                "compile without XLA (jit_compile=False); for the gradients of embeddings, "
                "DistributedOptimizer(sparse_as_dense=True) will do, too.");
      }
      *data = results[index].data;
      return Status();
    };
  }
  submit(std::move(request));
  return future;
}

ffi::Future collective_on_host(ffi::RemainingArgs arguments, ffi::RemainingRets returns,
                               ffi::Dictionary dictionary) {
  return submitted(dictionary, kOnHost, nullptr, arguments, returns);
}

// On a GPU what is done is that XLA's stream waits for the result, as with TensorFlow's kernels.
// Here XLA's thread does wait for the future, that is, for the other ranks, but not for the GPU;
// for that of an allreduce that does not wait, it does so in hvd_wait.
ffi::Future collective_on_gpu(void* stream, int32_t device, ffi::RemainingArgs arguments,
                              ffi::RemainingRets returns, ffi::Dictionary dictionary) {
  return submitted(dictionary, device, stream, arguments, returns);
}

// XLA's thread waits for the other ranks here, and XLA's stream for the results. Whatever fails, it
// waits for all: afterwards XLA uses the memory again.
ffi::Error wait_on_gpu(void* stream, ffi::RemainingArgs arguments, ffi::RemainingRets,
                       ffi::Dictionary dictionary) {
  Status first;
  const auto note = [&first](const Status& status) {
    if (first.ok()) first = status;
  };
  for (size_t i = 0; i + 1 < arguments.size(); ++i) {
    const ffi::AnyBuffer tensor = *arguments.get<ffi::AnyBuffer>(i);
    if (tensor.element_count() == 0) continue;
    const Begun::Result result = Begun::instance().take(tensor.untyped_data());
    note(result.valid() ? result.get()
                        : Status::error(Code::internal,
                                        "XLA has copied a tensor between an allreduce and the wait "
                                        "for it. Compile without XLA (jit_compile=False), and "
                                        "report this."));
  }
  note(wait_for_requests(static_cast<int>(*dictionary.get<int64_t>("process_set")), stream));
  return to_error(first);
}

ffi::Error rank_info(ffi::Result<ffi::BufferR0<ffi::S32>> value, ffi::Dictionary dictionary) {
  return to_error(look_up(std::string(*dictionary.get<std::string_view>("what")),
                          static_cast<int>(*dictionary.get<int64_t>("process_set")),
                          value->typed_data()));
}

XLA_FFI_DEFINE_HANDLER(kCollective, collective_on_host,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_collective", "Host", kCollective);

XLA_FFI_DEFINE_HANDLER(kCollectiveOnGpu, collective_on_gpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_collective", "CUDA", kCollectiveOnGpu);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_collective", "ROCM", kCollectiveOnGpu);

XLA_FFI_DEFINE_HANDLER(
    kWaitOnGpu, wait_on_gpu,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_wait", "CUDA", kWaitOnGpu);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_wait", "ROCM", kWaitOnGpu);

XLA_FFI_DEFINE_HANDLER(kRankInfo, rank_info,
                       ffi::Ffi::Bind().Ret<ffi::BufferR0<ffi::S32>>().Attrs());
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "hvd_rank_info", "Host", kRankInfo);

}  // namespace
}  // namespace hvd
