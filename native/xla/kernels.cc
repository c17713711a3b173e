// What XLA compiles of the ops: one custom call each, which hands its tensors to the engine when it
// runs (handlers.cc).
//
// XLA orders nothing but by data, and custom calls without data in common run at the same time. So
// every call takes a scalar from the previous call and passes it to the next: the chain.
//
// On a GPU the call of an allreduce that does not wait goes as early as it can, and the one that
// waits for it as late: computation that lies between them is not held up.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/kernel_api.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/request_of_node.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/shape_util.h"

namespace hvd {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;

// In the text of an MLIR dictionary, where bytes can be escaped as two hexadecimal digits.
std::string escaped(const std::string& text) {
  static const char* digits = "0123456789abcdef";
  std::string result = "\"";
  for (const unsigned char c : text) {
    if (c < 0x80 && (std::isalnum(c) || c == ' ' || c == '.' || c == '/' || c == '_')) {
      result += static_cast<char>(c);
    } else {
      result += {'\\', digits[c / 16], digits[c % 16]};
    }
  }
  return result + "\"";
}

// The end of the chain, one in each computation that is being compiled.
struct Chain : public tensorflow::ResourceBase {
  std::string DebugString() const override { return "hvd_keras: the last collective"; }
  xla::XlaOp end;
};

// Adds a call to the program, and to the chain. It has as many results as `results`, and one for
// the chain. Where `in_place`, a result has the memory of its operand, where nothing else needs
// that; otherwise XLA copies the operand first.
absl::Status add_call(XlaOpKernelContext* c, const std::string& target,
                      const std::string& dictionary, std::vector<xla::XlaOp> operands,
                      std::vector<xla::Shape> shapes, std::vector<xla::Shape> results,
                      bool in_place, xla::CustomCallSchedule schedule) {
  Chain* chain = nullptr;
  tensorflow::OpKernelContext* context = c->op_kernel_context();
  TF_RETURN_IF_ERROR(context->step_container()->LookupOrCreate<Chain>(
      context->resource_manager(), "hvd_chain", &chain, [](Chain** made) {
        *made = new Chain;
        return absl::OkStatus();
      }));
  const tensorflow::core::ScopedUnref release(chain);
  const xla::Shape scalar = xla::ShapeUtil::MakeShapeWithDescendingLayout(xla::F32, {});
  operands.push_back(chain->end.valid() ? chain->end : xla::ConstantR0<float>(c->builder(), 0));
  shapes.push_back(scalar);
  results.push_back(scalar);
  const int64_t count = results.size() - 1;
  std::vector<std::pair<xla::ShapeIndex, std::pair<int64_t, xla::ShapeIndex>>> shared;
  for (int64_t i = 0; in_place && i < count; ++i) shared.push_back({{i}, {i, {}}});
  shared.push_back({{count}, {static_cast<int64_t>(operands.size()) - 1, {}}});
  // Without "side effect" XLA would drop the last calls if nothing uses their results.
  const xla::XlaOp call = xla::CustomCallWithLayout(
      c->builder(), target, operands, xla::ShapeUtil::MakeTupleShape(results), shapes,
      "{" + dictionary + "}", /*has_side_effect=*/true, shared, /*literal=*/nullptr, schedule,
      xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
  for (int64_t i = 0; i < count; ++i) {
    c->SetOutput(static_cast<int>(i), xla::GetTupleElement(call, i));
  }
  chain->end = xla::GetTupleElement(call, count);
  return absl::OkStatus();
}

bool is_of_gpu(const OpKernelConstruction* c) {
  return c->device_type() == tensorflow::DEVICE_GPU_XLA_JIT;
}

class CollectiveXlaKernel : public XlaOpKernel {
 public:
  explicit CollectiveXlaKernel(OpKernelConstruction* c)
      : XlaOpKernel(c), call_(request_of(c->def())), on_gpu_(is_of_gpu(c)) {}

  void Compile(XlaOpKernelContext* c) override {
    // The first two for those who read XLA's program.
    std::string dictionary = "op = " + escaped(def().op()) +
                             ", tensor_name = " + escaped(call_.name) +
                             ", request = " + escaped(encode_header(call_));
    if (call_.kind == Kind::alltoall) OP_REQUIRES_OK(c, add_splits(c, &dictionary));
    std::vector<xla::XlaOp> operands;
    std::vector<xla::Shape> shapes, results;
    // Not an alltoall's splits: all are equal, and memory of the host, which a GPU's program lacks.
    const int count = call_.kind == Kind::alltoall ? 1 : c->num_inputs();
    for (int i = 0; i < count; ++i) {
      const auto shape = c->InputXlaShape(i);
      OP_REQUIRES_OK(c, shape.status());
      OP_REQUIRES(c, shape->is_static(),
                  refused("the shape of a tensor is known only when it runs",
                          "Give it a fixed shape (tf.ensure_shape)"));
      operands.push_back(c->Input(i));
      // All ranks' bytes must lie alike.
      shapes.push_back(xla::ShapeUtil::MakeShapeWithDescendingLayout(shape->element_type(),
                                                                     shape->dimensions()));
    }
    OP_REQUIRES_OK(c, set_results(shapes, &results));

    const bool early = on_gpu_ && !call_.waits;
    OP_REQUIRES_OK(c,
                   add_call(c, "hvd_collective", dictionary, std::move(operands), std::move(shapes),
                            std::move(results), collective(call_.kind).keeps_shape,
                            early ? xla::CustomCallSchedule::SCHEDULE_EARLIEST
                                  : xla::CustomCallSchedule::SCHEDULE_NONE));
    // The ranks' splits are equal, or the call fails.
    if (call_.kind == Kind::alltoall) c->SetOutput(1, c->Input(1));
  }

 private:
  absl::Status refused(const std::string& why, const std::string& cure) const {
    return absl::InvalidArgumentError(std::string("hvd.") + collective(call_.kind).name + " '" +
                                      call_.name + "' cannot be compiled by XLA: " + why + ". " +
                                      cure + ", or compile without XLA (jit_compile=False).");
  }

  // The outputs' shapes if all ranks' inputs have the shapes of this one's. Whether they have, the
  // handler sees.
  absl::Status set_results(const std::vector<xla::Shape>& shapes,
                           std::vector<xla::Shape>* results) const {
    *results = shapes;
    if (collective(call_.kind).keeps_shape || call_.kind == Kind::alltoall) return absl::OkStatus();
    int size = 0, set_rank = 0;
    TF_RETURN_IF_ERROR(to_absl(look_up("size", call_.process_set, &size)));
    TF_RETURN_IF_ERROR(to_absl(look_up("set_rank", call_.process_set, &set_rank)));
    for (xla::Shape& shape : *results) {
      if (shape.dimensions().empty()) continue;  // the engine refuses it on all ranks
      const int64_t rows = shape.dimensions(0);
      shape.set_dimensions(0, call_.kind == Kind::allgather
                                  ? rows * size
                                  : rows / size + (set_rank < rows % size ? 1 : 0));
    }
    return absl::OkStatus();
  }

  // Equal ones. Whether they fit the tensor and the ranks, the engine checks.
  absl::Status add_splits(XlaOpKernelContext* c, std::string* dictionary) const {
    std::vector<int64_t> splits;
    const bool known = c->ConstantInputAsIntVector(1, &splits).ok();
    if (!known ||
        std::adjacent_find(splits.begin(), splits.end(), std::not_equal_to<>()) != splits.end()) {
      return refused(known ? "its splits differ, so that what it receives depends on other ranks"
                           : "its splits are known only when it runs",
                     "Send each rank the same number of rows");
    }
    *dictionary += ", splits = " + std::to_string(splits.size()) +
                   " : i64, split_rows = " + std::to_string(splits.empty() ? 0 : splits[0]) +
                   " : i64";
    return absl::OkStatus();
  }

  const Request call_;  // all but the tensors
  const bool on_gpu_;
};

class WaitXlaKernel : public XlaOpKernel {
 public:
  explicit WaitXlaKernel(OpKernelConstruction* c) : XlaOpKernel(c), on_gpu_(is_of_gpu(c)) {
    OP_REQUIRES_OK(c, c->GetAttr("process_set", &process_set_));
  }

  void Compile(XlaOpKernelContext* c) override {
    std::vector<xla::XlaOp> operands;
    std::vector<xla::Shape> shapes;
    for (int i = 0; i < c->num_inputs(); ++i) {
      const auto shape = c->InputXlaShape(i);
      OP_REQUIRES_OK(c, shape.status());
      operands.push_back(c->Input(i));
      shapes.push_back(xla::ShapeUtil::MakeShapeWithDescendingLayout(shape->element_type(),
                                                                     shape->dimensions()));
      if (!on_gpu_) c->SetOutput(i, operands.back());  // the collective has waited
    }
    if (!on_gpu_) return;
    const std::string dictionary = "process_set = " + std::to_string(process_set_) + " : i64";
    OP_REQUIRES_OK(c, add_call(c, "hvd_wait", dictionary, std::move(operands), shapes, shapes,
                               /*in_place=*/true, xla::CustomCallSchedule::SCHEDULE_LATEST));
  }

 private:
  const bool on_gpu_;
  int process_set_ = 0;
};

class RankInfoXlaKernel : public XlaOpKernel {
 public:
  explicit RankInfoXlaKernel(OpKernelConstruction* c) : XlaOpKernel(c), on_gpu_(is_of_gpu(c)) {
    OP_REQUIRES_OK(c, c->GetAttr("what", &what_));
    OP_REQUIRES_OK(c, c->GetAttr("process_set", &process_set_));
  }

  void Compile(XlaOpKernelContext* c) override {
    OP_REQUIRES(c, !on_gpu_,  // the number is in the host's memory
                absl::UnimplementedError(
                    "hvd.rank_op, hvd.size_op and their like cannot be compiled by XLA for a GPU. "
                    "Use the numbers hvd.rank() and hvd.size(), or compile without XLA "
                    "(jit_compile=False)."));
    c->SetOutput(0, xla::CustomCallWithLayout(
                        c->builder(), "hvd_rank_info", {},
                        xla::ShapeUtil::MakeShapeWithDescendingLayout(xla::S32, {}), {},
                        "{what = " + escaped(what_) +
                            ", process_set = " + std::to_string(process_set_) + " : i64}",
                        /*has_side_effect=*/false, {}, /*literal=*/nullptr,
                        xla::CustomCallSchedule::SCHEDULE_NONE,
                        xla::CustomCallApiVersion::API_VERSION_TYPED_FFI));
  }

 private:
  const bool on_gpu_;
  std::string what_;
  int process_set_ = 0;
};

// Not by XLA's own REGISTER_XLA_OP, which is ignored in a process that has compiled something
// before.
template <typename Kernel>
void register_kernel(const std::string& op, const char* device) {
  tensorflow::kernel_factory::OpKernelRegistrar(
      tensorflow::KernelDefBuilder(op.c_str()).Device(device).Build(), op,
      [](OpKernelConstruction* c) -> tensorflow::OpKernel* { return new Kernel(c); });
}

bool register_all() {
  for (const char* device : {tensorflow::DEVICE_CPU_XLA_JIT, tensorflow::DEVICE_GPU_XLA_JIT}) {
    for (const Collective& row : collectives()) {
      if (row.xla) register_kernel<CollectiveXlaKernel>(op_of(row), device);
    }
    register_kernel<WaitXlaKernel>("HvdWait", device);
    register_kernel<RankInfoXlaKernel>("HvdRankInfo", device);
  }
  return true;
}

const bool registered = register_all();

}  // namespace
}  // namespace hvd
