// The ops as TensorFlow sees them. All are stateful, so that TensorFlow neither folds, merges nor
// drops them and runs them in the order in which a function was traced: the order is the agreement.
//
// Most take a list of tensors, which travel together. `tensor_name` identifies the request on all
// ranks of the process set; `note` is text that must be equal on them, too.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status same_shapes(InferenceContext* c) {
  for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
  return absl::OkStatus();
}

// Of the first tensors; the others, splits, keep their shape.
absl::Status unknown_first_dimension(InferenceContext* c, int tensors) {
  for (int i = 0; i < c->num_inputs(); ++i) {
    ShapeHandle shape = c->input(i);
    if (i < tensors && c->RankKnown(shape)) {
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
    }
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status free_first_dimension(InferenceContext* c) {
  return unknown_first_dimension(c, c->num_inputs());
}

#define HVD_ANY_DTYPE                                                                        \
  "{bool, uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, " \
  "double}"

#define HVD_OP(name) \
  REGISTER_OP(name).Attr("tensor_name: string").Attr("process_set: int = 0").SetIsStateful()
#define HVD_OP_OF_TENSORS(name) \
  HVD_OP(name).Attr("T: list(" HVD_ANY_DTYPE ") >= 1").Attr("note: string = ''").Input("tensors: T")

HVD_OP_OF_TENSORS("HvdAllreduce")
    .Attr("reduction: {'Average', 'Sum', 'Min', 'Max', 'Product', 'Adasum'} = 'Sum'")
    .Attr("prescale_factor: string = '1'")  // float64 in decimal: TensorFlow's float attributes are
                                            // float32
    .Attr("postscale_factor: string = '1'")
    .Attr("wire_dtype: {'float16', 'bfloat16', 'float64'} = 'float64'")  // the widest that travels
    .Attr("waits: bool = true")  // or a GPU's stream does so in HvdWait
    .Output("reduced: T")
    .SetShapeFn(same_shapes);

// Gives tensors on that HvdAllreduce(waits=False) has given. Other work can go to the GPU between
// the two.
REGISTER_OP("HvdWait")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .Input("tensors: T")
    .Output("ready: T")
    .SetShapeFn(same_shapes);

HVD_OP_OF_TENSORS("HvdAllgather").Output("gathered: T").SetShapeFn(free_first_dimension);

HVD_OP_OF_TENSORS("HvdBroadcast")
    .Attr("root_rank: int")
    .Output("values: T")
    .SetShapeFn(same_shapes);

HVD_OP("HvdAlltoall")
    .Attr("T: " HVD_ANY_DTYPE)
    .Attr("note: string = ''")
    .Input("tensor: T")
    .Input("splits: int64")
    .Output("received: T")
    .Output("received_splits: int64")
    .SetShapeFn([](InferenceContext* c) { return unknown_first_dimension(c, 1); });

HVD_OP_OF_TENSORS("HvdReducescatter")
    .Attr("reduction: {'Average', 'Sum'} = 'Sum'")
    .Attr("prescale_factor: string = '1'")
    .Attr("postscale_factor: string = '1'")
    .Output("reduced: T")
    .SetShapeFn(free_first_dimension);

// For automatic mode: what other ranks than the root get is of no meaning.
HVD_OP_OF_TENSORS("HvdReduce")
    .Attr("root_rank: int")
    .Attr("reduction: {'Sum', 'Min', 'Max'} = 'Sum'")
    .Output("reduced: T")
    .SetShapeFn(same_shapes);

HVD_OP("HvdBarrier").SetShapeFn(tensorflow::shape_inference::NoOutputs);

HVD_OP("HvdJoin").Output("last: int32").SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HvdRankInfo")
    .Attr("what: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int = 0")
    .Output("value: int32")
    .SetIsStateful()  // not to be folded into a constant of the graph
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

}  // namespace
}  // namespace hvd
