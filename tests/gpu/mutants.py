"""Breaks the code for GPUs in one place after another; the tests on the fake must notice each.

A mutant is a source file with one event, wait, stream, group, order, buffer or offset removed or
swapped. Each is linked into the test programs, which must fail or not end in time.
"""

import argparse
import collections
import concurrent.futures
import functools
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass

from tests.harness import ranks, sanitize

ROOT = pathlib.Path(__file__).parents[2]
GPU, XLA = "native/core/gpu", "native/xla"
# With the seconds that each has: the fast ones first. None takes a tenth of that by itself.
TESTS = {
    "gpu_sets_test": 20,
    "gpu_test": 60,
    "exchange_test": 60,
    "gpu_faults_test": 120,
    "engine_test": 120,
}
WITH_MPI = ("gpu_test", "exchange_test", "engine_test")
XLA_SECONDS = 150

# What is replaced, by what: each occurrence in the file is a mutant.
RULES = {
    f"{GPU}/gpu.cc": [
        (r"cuda_\.check\(cuda_\.record_event\(event, stream\), \"cudaEventRecord\"\);", ""),
        (r"cuda_\.check\(cuda_\.stream_wait\(stream, event\.get\(\), 0\)[^;]*;", ""),
        (r"record_event\(event, stream\)", "record_event(event, stream_)"),
        (r"stream_wait\(stream, event", "stream_wait(stream_, event"),
        (r"cuda_\.copy\(target, source, bytes", "cuda_.copy(target, source, bytes / 2"),
        (r"copy\(target, source, bytes, k", "copy(const_cast<void*>(source), target, bytes, k"),
        (r"kCudaMemcpyDefault, stream \? stream : stream_\)", "kCudaMemcpyDefault, nullptr)"),
        (r"&stream, kCudaStreamNonBlocking", "&stream, 0"),
        (r"stream \? stream : stream_", "stream_"),
        (r"if \(back_stream_\) cuda_\.destroy_stream\(back_stream_\);", ""),
        (r"kCudaStreamNonBlocking, greatest", "kCudaStreamNonBlocking, least"),
        (r"cuda_\.destroy_stream\(stream_\);", ""),
        (r"(?<=if \(result == kCudaNotReady\) return )false;", "true;"),
        (r"cuda_\.query_event\(event\.get\(\)\)", "kCudaSuccess"),
        (r"blocks\.erase\(found\);", ""),
        (r"store_->events\.pop_back\(\);", ""),
    ],
    f"{GPU}/gpu_transport.cc": [
        (r"gpu->wait\([^;]*;", ";"),
        (r"gpu->record\(gpu->stream\(\)\)", "gpu->record(framework)"),
        (r"gpu->record\(framework\)", "gpu->record(gpu->stream())"),
        (r"record\(static_cast<CudaStream>\(request\.stream\)\)", "record(gpu->stream())"),
        (r"gpu->wait\(gpu->stream\(\), ", "gpu->wait(framework, "),
        (r"gpu->wait\(framework, ", "gpu->wait(gpu->stream(), "),
        (r"static_cast<CudaStream>\(request\.stream\);", "gpu->stream();"),
        (r"pause, framework\);", "pause, gpu->stream());"),
        (r"\*host_, gpu\.stream\(\)\)", "*host_, nullptr)"),
        (r"if \(nccl && in_turns_\) turn\.emplace\([^;]*;", ""),
        (r"turn\.emplace\(LaunchOrder[^;]*;", ""),
        (r"if \(nccl\) order\.set_last\([^;]*;", ""),
        (r"if \(agreement\) in_turns_ = [^;]*;", ""),
        (r"gpu\.copy\([^;]*;", ""),
        (r"std::memcpy\(locked\.get\(\), input\.data[^;]*", ""),
        (r"input\.data = memory\.get\(\);", ""),
        (r"request\.outputs\[i\] = memory\.get\(\);", ";"),
        (
            r"held->push_back\(gpu\.allocate\(bytes\)\);\n\s+\*data = held->back\(\)\.get\(\);",
            "*data = gpu.allocate(bytes).get();",
        ),
        (r"works_\.push_back\([^;]*;", ""),
        (r"if \(!joined && request\.waits\)", "if (!joined)"),
        (r"last_done_ = done;", ""),
        (r"awaited_\.push_back\([^;]*;", ""),
        (r"gpu_->wait\([^;]*;", ""),
        (r"if \(nccl\) groups_in_works_ = [^;]*;", ""),
        (r"gpu_->finished\(works_\.front\(\)\.done\)", "true"),
        (r"if \(!works_\.empty\(\) \|\| has_lost_work\(\)\) abort_process_\(why\);", ""),
        (r"held->insert\([^;]*;", ""),
        (r"communicator_\.release\(\);", "communicator_.reset();"),
        (r"LaunchOrder::of\(gpu_->device\(\)\)\.forget\(last_launch_\);", ""),
    ],
    f"{GPU}/gpu_staging.cc": [
        (r"gpu\.record\(stream\)", "gpu.record(gpu.stream())"),
        (r"while \(!gpu\.finished\(event\)\) pause\(\);", ""),
        (r"  wait_for\(gpu, gpu\.stream\(\), pause\);", ""),
        (r"if \(status\.ok\(\)\) wait_for\(gpu, framework, pause\);", ""),
        (r"wait_for\(gpu, framework, pause\)", "wait_for(gpu, gpu.stream(), pause)"),
        (r"wait_for\(gpu, gpu\.stream\(\), pause\)", "wait_for(gpu, nullptr, pause)"),
        (r"gpu\.copy\([^;]*;", ";"),
        (r"held->push_back\(memory\);", ""),
        (
            r"held->push_back\(slot\.memory = gpu\.pinned\(bytes\)\);",
            "slot.memory = gpu.pinned(bytes);",
        ),
        (r"if \(slot\.out\) gpu\.wait\(in, slot\.out\);", ""),
        (r"if \(slot\.out && out != in\) gpu\.wait\(in, slot\.out\);", ";"),
        (r"wait_for\(gpu, slot\.in, pause\);", ""),
        (r"p \+ kSlots", "p + 1"),
        (r"copied < std::min", "copied <= std::min"),
        (r"slot\.in = gpu\.record\(in\)", "slot.in = gpu.record(out)"),
        (r"slot\.out = gpu\.record\(out\)", "slot.out = gpu.record(in)"),
        (r"let_copies_end\(gpu\);", ""),
        (r"!gpu\.finished\(last\)", "false"),
        (r"last = gpu\.record\(gpu\.stream\(\)\)", "last = gpu.record(gpu.back_stream())"),
        (r"gpu\.wait\(gpu\.stream\(\), gpu\.record\(gpu\.back_stream\(\)\)\);", ""),
        (r"wait_for\(gpu, gpu\.record\(stream\), pause\);", ""),
        (r"staged\.inputs\[i\]\.data = staged\.outputs\[i\]", "staged.outputs[i]"),
        (r"parts\[p\]\.outputs\[i\](?=, slot\.staged)", "parts[0].outputs[i]"),
        (r"place \+= aligned\(part\.inputs\[i\]\.bytes\(\)\);", ""),
        (r"(?<=<const char\*>\()input\.data\) \+ begin", "input.data)"),
        (r"(?<=<char\*>\()request\.outputs\[i\]\) \+ begin", "request.outputs[i])"),
        (r"room -= aligned\(end - begin\);", ""),
        (r"bytes \+= aligned\(input\.bytes\(\)\);", "bytes += input.bytes() / 2;"),
        (r"\|\| request\.reduction == Reduction::adasum", ""),
        (
            r"held->push_back\(gpu\.pinned\(bytes\)\);\n\s+\*data = held->back\(\)\.get\(\);",
            "*data = gpu.pinned(bytes).get();",
        ),
        (r"allocated\(\);", ";"),
        (r"(?<=gpu\.copy\(memory\.get\(\), )input\.data", "request.inputs[0].data"),
        (r"staged\.inputs\[i\]\.data = memory\.get\(\);", ""),
        (r"back\.push_back\(\{own, \*data, bytes\}\);", ""),
        (r"is_root && input\.data != request\.outputs\[i\]", "is_root"),
        (r"gpu\.copy\(request\.outputs\[i\], ", "gpu.copy(request.outputs[0], "),
        (r"direct\.inputs\[i\]\.data = request\.outputs\[i\];", ""),
    ],
    f"{GPU}/nccl_api.cc": [
        (r"check\(nccl_\.group_start\(\), \"ncclGroupStart\"\);", ""),
        (r"check\(nccl_\.group_end\(\), \"ncclGroupEnd\"\);", ""),
        (r"check\(nccl_\.finalize\(comm_\), \"ncclCommFinalize\"\);", ""),
        (r"cuda\.set_device\(device\);", ""),
        (r"while \(creation->state != ended\) pause\(\);", ""),
        (r"check\(creation->result, \"ncclCommInitRankConfig\"\);", ""),
        (r"\(\*pause_\)\(\);", ""),
        (r"!ended_\.wait_for\([^{]*\{ return over_; \}\)", "false"),
        (r"\+\+groups_;", ""),
        (r"check\(state, \"what it had begun\"\);", ""),
    ],
    f"{GPU}/nccl_collectives.cc": [
        (r"\bstream_\)", "nullptr)"),
        (r"  allocated\(\);", ""),
        (r"out \+= of_ranks\[r\];", ""),
        (r"in \+ begin\[r\]", "in"),
        (r"\(begin\[r \+ 1\] - begin\[r\]\)(?= / size_of\(input\.dtype\))", "begin[1]"),
        (r"elements\(input\.shape\) / size", "elements(input.shape) / size / 2"),
        (r"(?<=all_reduce\()input\.data", "request.inputs[0].data"),
        (r"(?<=\.reduce\()input\.data", "request.inputs[0].data"),
        (r"op, root,", "op, host_.rank(),"),
        (r"(?<=broadcast\()input\.data", "request.inputs[0].data"),
        (r"(?<=reduce_scatter\()input\.data", "request.inputs[0].data"),
        (r"(?<=<const char\*>\()input\.data", "request.inputs[0].data"),
        (r"(?<=input\.data, )request\.outputs\[i\]", "request.outputs[0]"),
        (r"(?<=begin\[r\], )request\.outputs\[i\]", "request.outputs[0]"),
        (r"request\.inputs\[i\]\.data;", "request.inputs[0].data;"),
        (r"(?<=all_gather\(in, )request\.outputs\[i\]", "request.outputs[0]"),
        (r"(?<=<char\*>\()request\.outputs\[i\]", "request.outputs[0]"),
        (r"r == host_\.rank\(\) \? in : out", "in"),
        (r"part\.data, part\.bytes", "part.data, part.bytes / 2"),
        (r"(?<=send\()part\.data", "sent[0].data"),
        (r"(?<=receive\()part\.data", "received[0].data"),
        (r"kNcclBytes, root,", "kNcclBytes, host_.rank(),"),
        (r"part\.rank", "host_.rank()"),
        (r"of_ranks\[r\], kNcclBytes, r,", "of_ranks[r], kNcclBytes, 0,"),
        (r"communicator_\.group\(", "([](const auto& run, const Pause&) { run(); })("),
        (r"if \(!status\.ok\(\)\) return status;", ""),
        (r"\bop, r,", "op, 0,"),
    ],
    f"{GPU}/launch_order.cc": [
        (r"become\(\*std::max_element\([^;]*;", ""),
        (r"while \(!is_first\(\)\) pause\(\);", ""),
        (r"order_\.clock_ = std::max\([^;]*;", ""),
        (r"\+\+order_\.clock_", "order_.clock_"),
        (r"last_ = done;", ""),
        (r"if \(last_ == done\) last_ = nullptr;", ""),
    ],
    f"{XLA}/handlers.cc": [
        (r"request\.device = device;", "request.device = 0;"),
        (r"request\.stream = stream;", ""),
        (r"\(dictionary, device, stream,", "(dictionary, device, nullptr,"),
        (r"outputs\.push_back\(result\.data\)", "outputs.push_back(results[0].data)"),
        (r"outputs\.push_back\(results\[i\]\.data\)", "outputs.push_back(results[0].data)"),
        (r"note\(wait_for_requests\([^;]*;", ""),
        (r"note\(result\.valid\(\) \? result\.get\(\)", "note(result.valid() ? Status()"),
        (r"\*data = results\[index\]\.data;", "*data = results[0].data;"),
    ],
}

# Mutants that do what the original does, by file and the text that is gone.
EQUIVALENT = {
    ("nccl_collectives.cc", "r == host_.rank() ? in : out"): "NCCL reads the root's input only",
    (
        "gpu_staging.cc",
        "held->push_back(slot.memory = gpu.pinned(bytes));",
    ): "who gets the memory next copies in the same stream",
    (
        "gpu_staging.cc",
        "gpu.wait(gpu.stream(), gpu.record(gpu.back_stream()));",
    ): "only a stream that is late shows it, by HVD_FAKE_CUDA_SEED",
}

# Of these an unchanged copy is tested like a mutant: the tests must pass.
CONTROLS = (f"{GPU}/gpu.cc", f"{XLA}/handlers.cc")

# What must be in some mutant, in each of these files: events and waits; streams that are passed on;
# groups, and the waits for NCCL; buffers that are passed on, and offsets. Definitions are none.
_FIRST = r"(?:(?<=\()|(?<=, )|(?<=  ))"  # of an argument
SITES = {
    "events": r"(?<![:\w])(?:record|record_event|query_event|finished)\((?!const)",
    "waits": r"(?<![:\w])(?:wait|stream_wait|wait_for)\((?!(?:const )?Gpu)",
    "streams": _FIRST + r"(?:stream_?|framework|gpu(?:->|\.)stream\(\))(?=[,)])"
    r"|static_cast<CudaStream>\([^)]*\)|request\.stream = ",
    "groups": r"(?<![:\w])(?:group_start|group_end|finalize)\((?!const)|communicator_\.group\(",
    "buffers": r"(?<![.\w])(?:request\.|direct\.|staged\.)?"
    r"(?:outputs\[i\]|(?:inputs\[i\]|input|part|results?(?:\[index\])?)\.data\b(?!\())",
    "offsets": r"begin\[r\]|out \+=",
}


@dataclass
class Mutant:
    """One change of one place."""

    path: str  # from the root
    start: int
    old: str
    new: str

    @functools.cached_property
    def text(self) -> str:
        """Of the whole file."""
        text = (ROOT / self.path).read_text()
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    @property
    def file(self) -> str:
        return pathlib.Path(self.path).name

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.start) + 1

    @property
    def equivalent(self) -> str:
        """Why nothing can notice it, or ""."""
        return EQUIVALENT.get((self.file, " ".join(self.old.split())), "")

    def __str__(self) -> str:
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}:{self.line}: {old} -> {new or 'nothing'}"


def mutants() -> list[Mutant]:
    """All of them, in the order of the sources."""
    found = []
    for path, rules in RULES.items():
        text = (ROOT / path).read_text()
        for pattern, new in rules:
            matches = list(re.finditer(pattern, text))
            if not matches:
                sys.exit(f"tests/gpu/mutants.py: '{pattern}' is not in {path} any more")
            found += [Mutant(path, match.start(), match.group(), new) for match in matches]
    return sorted(found, key=lambda mutant: (mutant.path, mutant.start))


def sites() -> list[tuple[str, str, bool]]:
    """What should be in a mutant: its sort, where it is, and whether it is in one."""
    spans = collections.defaultdict(list)
    for mutant in mutants():
        spans[mutant.path].append((mutant.start, mutant.start + len(mutant.old)))
    found = []
    for path in [*sorted((ROOT / GPU).glob("*.cc")), ROOT / XLA / "handlers.cc"]:
        name = str(path.relative_to(ROOT))
        text = re.sub(r"//.*", lambda match: " " * len(match.group()), path.read_text())
        for sort, pattern in SITES.items():
            for match in re.finditer(pattern, text):
                inside = any(a < match.end() and match.start() < b for a, b in spans[name])
                line = text.count("\n", 0, match.start()) + 1
                what = text.splitlines()[line - 1].strip()
                found.append((sort, f"{path.name}:{line}: {match.group()} in {what}", inside))
    return found


def ends(command: str, folder: pathlib.Path, fake: str, seconds: float) -> int | None:
    """The exit status; None: it was ended after some seconds."""
    process = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "HVD_CUDART_LIBRARY": fake, "HVD_NCCL_LIBRARY": fake},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        try:
            if number:
                os.killpg(process.pid, number)
            status = process.wait(timeout=10 if number else seconds)
            return None if number else status
        except subprocess.TimeoutExpired:
            pass
    return None


class Build:
    """The original, compiled, and what is linked from it with one object replaced."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.fake = str(folder / "tests" / "libhvd_fake_cuda.so")

    @functools.cache  # noqa: B019 (there is one)
    def commands(self, target: str) -> list[str]:
        """What makes a file of the build, from nothing."""
        ninja = [str(pathlib.Path(sys.executable).parent / "ninja"), "-C", str(self.folder)]
        command = [*ninja, "-t", "commands", target]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    def compiled(self, mutant: Mutant, target: str, to: pathlib.Path) -> str:
        """Compiles it, and returns the original's object; "" if it is no program."""
        source = to / mutant.file
        source.write_text(mutant.text)
        lines = [line for line in self.commands(target) if line.endswith(mutant.path)]
        own = f"/{pathlib.Path(target).name}.dir/"  # compiled for this program alone
        (line,) = [line for line in lines if own in line] or lines
        words = [word for word in shlex.split(line) if word != "-Werror"]  # of what is unused now
        original = words[words.index("-o") + 1]
        words[words.index("-o") + 1] = str(to / "mutant.o")
        words[words.index("-MF") + 1] = str(to / "mutant.d")
        words[-1] = str(source)
        status = ends(shlex.join(words), self.folder, self.fake, 900)
        return original if status == 0 else ""

    def link(self, target: str, original: str, to: pathlib.Path) -> None:
        """Makes the target with the mutant in place of the original."""
        line = self.commands(target)[-2]  # the last is empty
        line = line.replace(f" {original} ", f" {to / 'mutant.o'} ")
        line = line.replace(f"-o {target} ", f"-o {to / pathlib.Path(target).name} ")
        if ends(line, self.folder, self.fake, 900) != 0:
            sys.exit(f"cannot link: {line}")

    def caught_by(self, mutant: Mutant, number: int) -> str:
        """Which test catches it, "" if none does; "compiler" if it is no program."""
        folder = self.folder / "mutants" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        if mutant.path.startswith(XLA):
            return self.caught_by_xla(mutant, folder)
        original = self.compiled(mutant, f"tests/{next(iter(TESTS))}", folder)
        if not original:
            return "compiler"
        for test, seconds in TESTS.items():
            self.link(f"tests/{test}", original, folder)
            command = str(folder / test)
            if test in WITH_MPI:
                command = f"{ranks.MPIRUN} --allow-run-as-root -np 2 --bind-to none "
                command += f"--map-by :OVERSUBSCRIBE {folder / test} gpu"
            status = ends(command, self.folder, self.fake, seconds)
            (folder / test).unlink()
            if status != 0:
                return test if status else f"{test} (does not end)"
        return ""

    def caught_by_xla(self, mutant: Mutant, folder: pathlib.Path) -> str:
        """The same of code that XLA's runtime calls: a library of the package is replaced."""
        (target,) = self.folder.glob("tf*/libhvd_xla.so")
        original = self.compiled(mutant, str(target.relative_to(self.folder)), folder)
        if not original:
            return "compiler"
        place = folder / "native" / target.parent.name
        place.mkdir(parents=True, exist_ok=True)
        self.link(str(target.relative_to(self.folder)), original, folder)
        (folder / target.name).rename(place / target.name)
        other = place / "libhvd_tensorflow.so"  # the package looks for both in one folder
        other.unlink(missing_ok=True)
        other.symlink_to(target.parent / other.name)
        program = f"import sys, runpy, hvd_keras; hvd_keras.__path__.append({str(folder)!r}); "
        program += "from hvd_keras.runtime import libraries; "
        program += f"libraries._tensorflow_folder().samefile({str(place)!r}) or sys.exit(0); "
        program += f"sys.argv[1:] = [{str(self.folder / 'tests' / 'libhvd_xla_gpu.so')!r}]; "
        program += "runpy.run_module('tests.gpu.xla', run_name='__main__')"
        command = f"{ranks.MPIRUN} --allow-run-as-root -np 2 --bind-to none "
        command += f"--map-by :OVERSUBSCRIBE {sys.executable} -c {shlex.quote(program)}"
        status = ends(command, ROOT, self.fake, XLA_SECONDS)
        return "" if status == 0 else "xla.py" if status else "xla.py (does not end)"


def main() -> None:
    """Prints each mutant and what caught it, and exits with 1 if nothing caught one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a pattern of mutants to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    chosen = [mutant for mutant in mutants() if re.search(arguments.only, str(mutant))]
    with_xla = any(mutant.path.startswith(XLA) for mutant in chosen)
    build = Build(sanitize.build("mutants", "-O0", "-g0", tensorflow=with_xla).parent)
    unseen = [where for _, where, inside in sites() if not inside]
    for where in unseen:
        print(f"no mutant of {where}")
    table = collections.defaultdict(collections.Counter)
    controls = [Mutant(path, 0, "", "") for path in CONTROLS if with_xla or GPU in path]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        numbered = enumerate([*controls, *chosen])
        results = pool.map(lambda pair: build.caught_by(pair[1], pair[0]), numbered)
        for control, failed in zip(controls, results, strict=False):
            if failed:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"{control.file} is unchanged, and {failed} fails")
        for mutant, caught in zip(chosen, results, strict=True):
            good = caught and caught != "compiler"
            what = "caught" if good else "equivalent" if mutant.equivalent else "not caught"
            table[mutant.file][what] += 1
            print(f"{mutant}: {caught or mutant.equivalent or 'SURVIVES'}", flush=True)
    for file, counts in table.items():
        print(
            f"{file}: {counts.total()} mutants, " + ", ".join(f"{n} {w}" for w, n in counts.items())
        )
    print(f"{len(chosen)} mutants of {len(sites())} places, {len(unseen)} places without one")
    sys.exit(1 if unseen or any(counts["not caught"] for counts in table.values()) else 0)


if __name__ == "__main__":
    main()
