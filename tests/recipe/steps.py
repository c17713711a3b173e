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
        "native/core/cpu/kind_transport.cc",
        "    case Kind::broadcast:",
        """    case Kind::shift:  // the toy collective of tests/recipe
      for (size_t i = 0; i < request.inputs.size(); ++i) {
        const Input& input = request.inputs[i];
        const int64_t bytes = static_cast<int64_t>(input.bytes());
        char* const sent = static_cast<char*>(const_cast<void*>(input.data));
        std::vector<char> received(bytes);  // the output may be the input's own memory
        exchange({{(rank() + 1) % size(), sent, bytes}},
                 {{(rank() + size() - 1) % size(), received.data(), bytes}});
        if (bytes > 0) std::memcpy(request.outputs[i], received.data(), bytes);
      }
      return {};
""",
        before=True,
    ),
    Step(
        "native/tensorflow/ops.cc",
        'HVD_OP_OF_TENSORS("HvdBroadcast")',
        'HVD_OP_OF_TENSORS("HvdShift").Output("shifted: T").SetShapeFn(same_shapes);\n\n',
        before=True,
    ),
    Step("hvd_keras/ops/shift.py", "", (HERE / "shift.py").read_text()),
    Step(
        "hvd_keras/ops/derivatives.py",
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
