"""The steps: which lines the toy collective adds, and where."""

import dataclasses
import pathlib

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Step:
    """Lines to add to one file.

    Attributes:
        path: of the file, from the root of the sources.
        anchor: the line beside which they are added; it occurs once in the file. Empty: the file is
            new.
        lines: what is added.
        before: whether they come before the anchor, not after it.
    """

    path: str
    anchor: str
    lines: str
    before: bool = False

    def apply(self, root: pathlib.Path) -> None:
        """Adds the lines."""
        path = root / self.path
        if not self.anchor:
            path.write_text(self.lines)
            return
        anchor = self.anchor + "\n"
        added = self.lines + anchor if self.before else anchor + self.lines
        path.write_text(path.read_text().replace(anchor, added))


STEPS = [
    Step("native/core/request/request.h", "  join,", "  shift,\n"),
    Step(
        "native/core/request/collectives.cc",
        '      {Kind::join, "join", no, no, no, no, yes, no, no, {"last"}},',
        '      {Kind::shift, "shift", no, no, no, yes, no, yes, yes, {}},\n',
    ),
    Step(
        "native/core/cpu/kind_transport.h",
        "    switch (request.kind) {",
        "      case Kind::shift:\n        return shift(request);\n",
    ),
    Step(
        "native/core/cpu/kind_transport.h",
        " protected:",
        "  virtual Status shift(Request& request) { return missing(request); }\n",
    ),
    Step(
        "native/core/cpu/mpi_transport.h",
        "  Status broadcast(Request& request) override;",
        "  Status shift(Request& request) override;\n",
    ),
    Step(
        "native/core/cpu/mpi_transport.cc",
        "Status MpiTransport::broadcast(Request& request) {",
        """// The toy collective of tests/recipe.
Status MpiTransport::shift(Request& request) {
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const Input& input = request.inputs[i];
    const int64_t bytes = static_cast<int64_t>(input.bytes());
    received_.resize(bytes);  // the output may be the input's own memory
    Exchange exchange(*this);
    exchange.receive(received_.data(), bytes, (rank_ + size() - 1) % size());
    exchange.send(input.data, bytes, (rank_ + 1) % size());
    exchange.finish();
    if (bytes > 0) std::memcpy(request.outputs[i], received_.data(), bytes);
  }
  return {};
}

""",
        before=True,
    ),
    Step(
        "native/tensorflow/ops.cc",
        '  "double}"',
        """
REGISTER_OP("HvdShift")
    .Attr("T: list(" HVD_ANY_DTYPE ") >= 1")
    .Attr("tensor_name: string")
    .Attr("note: string = ''")
    .Attr("process_set: int = 0")
    .Input("tensors: T")
    .Output("shifted: T")
    .SetIsStateful()
    .SetShapeFn(same_shapes);
""",
    ),
    Step("hvd_keras/ops/shift.py", "", (HERE / "shift.py").read_text()),
    Step(
        "hvd_keras/ops/gradients.py",
        '    return process_sets.of_id(op.get_attr("process_set"))',
        '''

@tf.RegisterGradient("HvdShift")
def _shift(op: Any, *upstream: Any) -> list[tf.Tensor]:
    """Back to the left neighbour: once around, but for the last step."""
    for step in range(_set_of(op).size() - 1):
        upstream = raw.hvd_shift(upstream, **_call(op, f".gradient.{step}"))
    return list(upstream)
''',
    ),
    Step(
        "hvd_keras/__init__.pyi",
        "from hvd_keras.ops.reducescatter import reducescatter as reducescatter",
        "from hvd_keras.ops.shift import shift as shift\n",
    ),
]
