"""Breaks the code for GPUs in one place after another; the tests on the fake must notice each.

A mutant is a source file of native/core/gpu with one event, wait, stream, group, order or offset
removed or swapped. Each is compiled into the test programs, which must fail or not end in time.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

from tests.harness import ranks, sanitize

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "native" / "core" / "gpu"
TESTS = ("gpu_sets_test", "gpu_faults_test", "gpu_test")
SECONDS = 60  # for one test program

# What is replaced, by what: each occurrence in the file is a mutant.
RULES = {
    "gpu.cc": [
        (r"cuda_\.check\(cuda_\.record_event\(event, stream\), \"cudaEventRecord\"\);", ""),
        (r"cuda_\.check\(cuda_\.stream_wait\(stream, event\.get\(\), 0\)[^;]*;", ""),
        (r"cuda_\.copy\(target, source, bytes", "cuda_.copy(target, source, bytes / 2"),
        (r"record_event\(event, stream\)", "record_event(event, stream_)"),
        (r"stream_wait\(stream, event", "stream_wait(stream_, event"),
        (r"kCudaMemcpyDefault, stream_\)", "kCudaMemcpyDefault, nullptr)"),
        (
            r"if \(result == kCudaNotReady\) return false;",
            "if (result == kCudaNotReady) return true;",
        ),
        (r"blocks\.erase\(found\);", ""),
        (r"store_->events\.pop_back\(\);", ""),
    ],
    "gpu_transport.cc": [
        (r"gpu->wait\([^;]*;", ";"),
        (r"gpu->record\(gpu->stream\(\)\)", "gpu->record(framework)"),
        (r"gpu->record\(framework\)", "gpu->record(gpu->stream())"),
        (r"record\(static_cast<CudaStream>\(request\.stream\)\)", "record(gpu->stream())"),
        (r"gpu->wait\(gpu->stream\(\), ", "gpu->wait(framework, "),
        (r"gpu->wait\(framework, ", "gpu->wait(gpu->stream(), "),
        (r"if \(nccl && in_turns_\) turn\.emplace\([^;]*;", ""),
        (r"if \(nccl\) order\.set_last\([^;]*;", ""),
        (r"in_turns_ = in_turns_ \|\| [^;]*;", ""),
        (r"gpu\.copy\([^;]*;", ""),
        (r"works_\.push_back\([^;]*;", ""),
        (r"if \(nccl\) groups_in_works_ = [^;]*;", ""),
        (r"gpu_->finished\(works_\.front\(\)\.done\)", "true"),
        (r"if \(!works_\.empty\(\) \|\| has_lost_work\(\)\) abort_process_\(why\);", ""),
        (r"held->insert\([^;]*;", ""),
        (r"communicator_\.release\(\);", "communicator_.reset();"),
        (r"if \(works_\.empty\(\)\) progress_ = Clock::now\(\);", ""),
    ],
    "gpu_staging.cc": [
        (r"while \(!gpu\.finished\(event\)\) pause\(\);", ""),
        (r"  wait_for\(gpu, gpu\.stream\(\), pause\);", ""),
        (r"if \(status\.ok\(\)\) wait_for\(gpu, framework, pause\);", ""),
        (r"wait_for\(gpu, gpu\.stream\(\), pause\)", "wait_for(gpu, nullptr, pause)"),
        (r"gpu\.copy\([^;]*;", ";"),
        (r"held->push_back\(memory\);", ""),
        (r"allocated\(\);", ";"),
        (r"back\.push_back\(\{request\.outputs\[i\]", "back.push_back({request.outputs[0]"),
        (r"back\.push_back\(\{own, \*data, bytes\}\);", ""),
        (r"direct\.inputs\[i\]\.data = request\.outputs\[i\];", ""),
    ],
    "nccl_communicator.cc": [
        (r"check\(nccl_\.group_start\(\), \"ncclGroupStart\"\);", ""),
        (r"check\(nccl_\.group_end\(\), \"ncclGroupEnd\"\);", ""),
        (r"settle\(\"ncclGroupEnd\", pause\);", ""),
        (r"settle\(\"ncclCommInitRankConfig\", pause\);", ""),
        (r"settle\(\"ncclCommFinalize\", pause\);", ""),
        (r"nccl_\.group_end\(\);  // the group", "// the group"),
        (r"\+\+groups_;", ""),
        (r"check\(state, call\);", ""),
        (r"check\(state, \"what it had begun\"\);", ""),
    ],
    "nccl_collectives.cc": [
        (r"\bstream_\)", "nullptr)"),
        (r"  allocated\(\);", ""),
        (r"out \+= of_ranks\[r\];", ""),
        (r"first \* width", "0"),
        (r"first_row\(input\.shape\[0\], r, size\) \* row", "0"),
        (r"elements\(input\.shape\) / size", "elements(input.shape) / size / 2"),
        (
            r"request\.outputs\[i\], elements\(input\.shape\),",
            "request.outputs[0], elements(input.shape),",
        ),
        (r"r == host_\.rank\(\) \? in : out", "in"),
        (r"kNcclBytes, root,", "kNcclBytes, host_.rank(),"),
        (r"part\.rank", "host_.rank()"),
        (r"of_ranks\[r\], kNcclBytes, r,", "of_ranks[r], kNcclBytes, 0,"),
        (r"communicator_\.group\(\n", "([](const auto& calls, const Pause&) { calls(); })(\n"),
        (r"all_or_none\(status, gather_numbers[^;]*;", "status;"),
        (r"\bop,\n\s+r, communicator_", "op,\n 0, communicator_"),
    ],
    "launch_order.cc": [
        (r"become\(\*std::max_element\([^;]*;", ""),
        (r"while \(!is_first\(\)\) pause\(\);", ""),
        (r"order_\.clock_ = std::max\([^;]*;", ""),
        (r"\+\+order_\.clock_", "order_.clock_"),
        (r"if \(last_ == done\) last_ = nullptr;", ""),
    ],
}

# Mutants that nothing can tell from the original, by file, line's text and replacement.
EQUIVALENT: dict[tuple[str, str], str] = {}


@dataclass
class Mutant:
    """One change of one place."""

    file: str
    line: int
    old: str
    new: str
    text: str  # of the whole file

    def __str__(self) -> str:
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}:{self.line}: {old} -> {new or 'nothing'}"


def mutants() -> list[Mutant]:
    """All of them, in the order of the sources."""
    found = []
    for file, rules in RULES.items():
        text = (SOURCES / file).read_text()
        for pattern, new in rules:
            matches = list(re.finditer(pattern, text))
            if not matches:
                sys.exit(f"tests/gpu/mutants.py: '{pattern}' is not in {file} any more")
            for match in matches:
                changed = text[: match.start()] + new + text[match.end() :]
                line = text.count("\n", 0, match.start()) + 1
                found.append(Mutant(file, line, match.group(), new, changed))
    return sorted(found, key=lambda mutant: (mutant.file, mutant.line))


def shell(
    command: str, folder: pathlib.Path, environment: dict[str, str], seconds: float = SECONDS
) -> int:
    """The exit status; that of a program that does not end is -1."""
    process = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return -1


def survives(mutant: Mutant, number: int, build: pathlib.Path) -> str:
    """Which test caught it, "" if none did; "compiler" if it is no program."""
    folder = build / "mutants" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    source, compiled = folder / mutant.file, folder / "mutant.o"
    source.write_text(mutant.text)
    compiled.unlink(missing_ok=True)  # of an earlier run
    fake = str(build / "tests" / "libhvd_fake_cuda.so")
    environment = {"HVD_CUDART_LIBRARY": fake, "HVD_NCCL_LIBRARY": fake}
    ninja = [str(pathlib.Path(sys.executable).parent / "ninja"), "-C", str(build), "-t", "commands"]
    for test in TESTS:
        commands = subprocess.run([*ninja, f"tests/{test}"], capture_output=True, text=True)
        lines = commands.stdout.splitlines()
        (compile_line,) = [line for line in lines if line.endswith(f"/core/gpu/{mutant.file}")]
        words = shlex.split(compile_line)
        original = words[words.index("-o") + 1]
        words[words.index("-o") + 1] = str(compiled)
        words[words.index("-MF") + 1] = str(folder / "mutant.d")
        words[-1] = str(source)
        if not compiled.exists() and shell(shlex.join(words), build, {}, 900) != 0:
            return "compiler"
        program = folder / test
        link = lines[-1].replace(original, str(compiled))
        link = link.replace(f"-o tests/{test} ", f"-o {program} ")
        if shell(link, build, {}, 900) != 0:
            sys.exit(f"cannot link: {link}")
        command = str(program)
        if test == "gpu_test":
            command = f"{ranks.MPIRUN} --allow-run-as-root -np 2 --bind-to none "
            command += f"--map-by :OVERSUBSCRIBE {program} gpu"
        status = shell(command, build, environment)
        program.unlink()
        if status != 0:
            return test if status > 0 else f"{test} (does not end)"
    return ""


def main() -> None:
    """Prints each mutant and what caught it, and exits with 1 if nothing caught one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, help="a build of native/tests to use")
    parser.add_argument("--only", default="", help="a pattern of mutants to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    build = (arguments.build or sanitize.build("mutants", "-O0", "-g0").parent).resolve()
    chosen = [mutant for mutant in mutants() if re.search(arguments.only, str(mutant))]
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda pair: survives(pair[1], pair[0], build), enumerate(chosen))
        for mutant, caught in zip(chosen, results, strict=True):
            reason = EQUIVALENT.get((mutant.file, " ".join(mutant.old.split())))
            what = caught or ("equivalent: " + reason if reason else "SURVIVES")
            print(f"{mutant}: {what}", flush=True)
            if what == "SURVIVES" or caught == "compiler":
                survivors.append(mutant)
    print(f"{len(chosen)} mutants, {len(survivors)} not caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
