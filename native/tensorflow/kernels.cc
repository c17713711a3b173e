// One asynchronous kernel for every collective: it wraps its tensors in a Request, submits it and
// returns; the engine calls back. No TensorFlow thread waits meanwhile.
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/kernel_api.h"
#include "core/request/request.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/request_of_node.h"
#include "xla/stream_executor/stream.h"

namespace hvd {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

DType to_dtype(tensorflow::DataType dtype) {
#define HVD_PAIR(dtype, name, bytes, type, tf, ...) {tensorflow::DT_##tf, DType::dtype},
  static const auto* table = new std::map<tensorflow::DataType, DType>{HVD_DTYPES(HVD_PAIR)};
  return table->at(dtype);  // the ops' type lists hold nothing else
}

Shape to_shape(const TensorShape& shape) {
  Shape dims;
  for (int i = 0; i < shape.dims(); ++i) dims.push_back(shape.dim_size(i));
  return dims;
}

// Sets the device and stream of a kernel's tensors. These are virtual functions of TensorFlow, so
// this library also loads into a TensorFlow without GPU support.
void set_device(OpKernelContext* c, Request* request) {
  if (c->num_inputs() == 0 || !c->op_device_context()) return;
  stream_executor::Stream* const stream = c->op_device_context()->stream();
  if (!stream) return;
  // As stream->parent() has it, too, but the header for that does not compile with every
  // TensorFlow.
  request->device = c->device()->tensorflow_accelerator_device_info()->gpu_id;
  request->stream = stream->platform_specific_handle().stream;
}

class CollectiveKernel : public AsyncOpKernel {
 public:
  explicit CollectiveKernel(OpKernelConstruction* c)
      : AsyncOpKernel(c), call_(request_of(c->def())) {}

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    Request request = call_;
    set_device(c, &request);
    const int n = c->num_inputs();
    for (int i = 0; i < n; ++i) {
      const Tensor& input = c->input(i);
      request.inputs.push_back({input.data(), to_dtype(input.dtype()), to_shape(input.shape())});
    }
    if (collective(call_.kind).keeps_shape) {
      for (int i = 0; i < n; ++i) {
        Tensor* output = nullptr;
        const absl::Status status =
            c->forward_input_or_allocate_output({i}, i, c->input(i).shape(), &output);
        if (!status.ok())
          request.problem = "its output cannot be allocated: " + std::string(status.message());
        request.outputs.push_back(status.ok() ? output->data() : nullptr);
      }
    } else {
      request.allocate = [c](size_t index, const Shape& shape, void** data) {
        Tensor* output = nullptr;
        const absl::Status status =
            c->allocate_output(static_cast<int>(index), TensorShape(shape), &output);
        if (!status.ok()) return Status::error(Code::internal, std::string(status.message()));
        *data = output->data();
        return Status();
      };
    }
    if (!request.waits && request.device != kOnHost) {
      auto memory = std::make_shared<std::vector<Tensor>>();
      for (int i = 0; i < n; ++i) {
        memory->push_back(c->input(i));
        if (const Tensor* output = c->mutable_output(i)) memory->push_back(*output);
      }
      request.memory = std::move(memory);
    }
    request.keep = [c] {
      for (int i = 0; i < c->num_inputs(); ++i) new Tensor(c->input(i));
      for (int i = 0; i < c->num_outputs(); ++i) {
        if (const Tensor* output = c->mutable_output(i)) new Tensor(*output);
      }
    };
    const auto failed = std::make_shared<std::atomic<bool>>(false);
    request.step_failed = failed;
    auto* const cancellation = c->cancellation_manager();
    const auto token = cancellation ? cancellation->get_cancellation_token() : 0;
    if (cancellation && !cancellation->RegisterCallback(token, [failed] { *failed = true; }))
      *failed = true;
    request.done = [c, cancellation, token, done = std::move(done)](const Status& status) {
      if (cancellation) cancellation->TryDeregisterCallback(token);  // never waits
      c->SetStatus(to_absl(status));
      done();
    };
    submit(std::move(request));
  }

 private:
  const Request call_;  // all but the tensors
};

class WaitKernel : public OpKernel {
 public:
  explicit WaitKernel(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("process_set", &process_set_));
  }

  void Compute(OpKernelContext* c) override {
    Request request;
    set_device(c, &request);
    if (request.device != kOnHost)
      OP_REQUIRES_OK(c, to_absl(wait_for_requests(process_set_, request.stream)));
    for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
  }

 private:
  int process_set_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("HvdWait").Device(tensorflow::DEVICE_CPU), WaitKernel);
REGISTER_KERNEL_BUILDER(Name("HvdWait").Device(tensorflow::DEVICE_GPU), WaitKernel);

bool register_collectives() {
  for (const Collective& row : collectives()) {
    for (const char* device : {tensorflow::DEVICE_CPU, tensorflow::DEVICE_GPU}) {
      const std::string op = op_of(row);
      tensorflow::KernelDefBuilder builder(op.c_str());
      builder.Device(device);
      for (const char* argument : row.on_host) builder.HostMemory(argument);
      tensorflow::kernel_factory::OpKernelRegistrar(
          builder.Build(), "CollectiveKernel",
          [](OpKernelConstruction* c) -> OpKernel* { return new CollectiveKernel(c); });
    }
  }
  return true;
}

const bool registered = register_collectives();

// A number of this process at the time when the graph runs, not when it is made.
class RankInfoKernel : public OpKernel {
 public:
  explicit RankInfoKernel(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("what", &what_));
    OP_REQUIRES_OK(c, c->GetAttr("process_set", &process_set_));
  }

  void Compute(OpKernelContext* c) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, {}, &output));
    OP_REQUIRES_OK(c, to_absl(look_up(what_, process_set_, &output->scalar<int>()())));
  }

 private:
  std::string what_;
  int process_set_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("HvdRankInfo").Device(tensorflow::DEVICE_CPU), RankInfoKernel);
REGISTER_KERNEL_BUILDER(Name("HvdRankInfo").Device(tensorflow::DEVICE_GPU).HostMemory("value"),
                        RankInfoKernel);

}  // namespace
}  // namespace hvd
