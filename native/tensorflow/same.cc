// Whether tensors have the same bytes as others, of the same dtypes: those that share their memory
// do. On a GPU only those.
#include <cstring>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_OP("HvdAreSame")
    .Attr("T: list(type) >= 1")
    .Input("tensors: T")
    .Input("others: T")
    .Output("same: bool")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs() / 2));
      return absl::OkStatus();
    });

class AreSameKernel : public OpKernel {
 public:
  explicit AreSameKernel(OpKernelConstruction* c)
      : OpKernel(c), on_host_(c->device_type() == tensorflow::DeviceType(tensorflow::DEVICE_CPU)) {}

  void Compute(OpKernelContext* c) override {
    Tensor* output = nullptr;
    const int n = c->num_inputs() / 2;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({n}), &output));
    for (int i = 0; i < n; ++i) output->vec<bool>()(i) = are_same(c->input(i), c->input(n + i));
  }

 private:
  bool are_same(const Tensor& one, const Tensor& other) const {
    if (one.shape() != other.shape()) return false;
    if (one.data() == other.data()) return true;
    return on_host_ && std::memcmp(one.data(), other.data(), one.TotalBytes()) == 0;
  }

  const bool on_host_;
};

REGISTER_KERNEL_BUILDER(Name("HvdAreSame").Device(tensorflow::DEVICE_CPU), AreSameKernel);
REGISTER_KERNEL_BUILDER(Name("HvdAreSame").Device(tensorflow::DEVICE_GPU).HostMemory("same"),
                        AreSameKernel);

}  // namespace
}  // namespace hvd
