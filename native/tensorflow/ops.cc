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

absl::Status free_first_dimension(InferenceContext* c) {
  for (int i = 0; i < c->num_inputs(); ++i) {
    ShapeHandle shape = c->input(i);
    if (c->RankKnown(shape)) {
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
    }
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status unknown_first_dimension_and_splits(InferenceContext* c) {
  ShapeHandle shape = c->input(0);
  if (c->RankKnown(shape)) {
    TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
    TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  }
  c->set_output(0, shape);
  c->set_output(1, c->input(1));
  return absl::OkStatus();
}

#define HVD_ANY_DTYPE                                                                        \
  "{bool, uint8, int8, uint16, int16, uint32, int32, uint64, int64, half, bfloat16, float, " \
  "double}"

REGISTER_OP("HvdAllreduce")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Attr("reduction: {'Average', 'Sum', 'Min', 'Max', 'Product', 'Adasum'} = 'Sum'")
    .Attr("prescale_factor: string = '1'")  // float64 in decimal: TensorFlow's float attributes are
                                            // float32
    .Attr("postscale_factor: string = '1'")
    .Attr("wire_dtype: {'float16', 'bfloat16', 'float64'} = 'float64'")  // the widest that travels
    .Input("tensors: T")
    .Output("reduced: T")
    .SetIsStateful()
    .SetShapeFn(same_shapes);

REGISTER_OP("HvdAllgather")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Input("tensors: T")
    .Output("gathered: T")
    .SetIsStateful()
    .SetShapeFn(free_first_dimension);

REGISTER_OP("HvdBroadcast")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Attr("root_rank: int")
    .Input("tensors: T")
    .Output("values: T")
    .SetIsStateful()
    .SetShapeFn(same_shapes);

REGISTER_OP("HvdAlltoall")
    .Attr("T: " HVD_ANY_DTYPE)
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Input("tensor: T")
    .Input("splits: int64")
    .Output("received: T")
    .Output("received_splits: int64")
    .SetIsStateful()
    .SetShapeFn(unknown_first_dimension_and_splits);

REGISTER_OP("HvdReducescatter")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Attr("reduction: {'Average', 'Sum'} = 'Sum'")
    .Attr("prescale_factor: string = '1'")
    .Attr("postscale_factor: string = '1'")
    .Input("tensors: T")
    .Output("reduced: T")
    .SetIsStateful()
    .SetShapeFn(free_first_dimension);

REGISTER_OP("HvdBarrier")
    .Attr("tensor_name: string")
    .Attr("process_set: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("HvdJoin")
    .Attr("tensor_name: string")
    .Attr("process_set: int = 0")
    .Output("last: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HvdRankInfo")
    .Attr("what: {'rank', 'size', 'local_rank', 'local_size', 'included'}")
    .Attr("process_set: int = 0")
    .Output("value: int32")
    .SetIsStateful()  // not to be folded into a constant of the graph
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

}  // namespace
}  // namespace hvd
