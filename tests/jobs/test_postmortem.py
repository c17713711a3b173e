"""What the ranks of a job leave in the folder of HVD_POSTMORTEM; test_faults.py reads it, too."""

import pathlib
import subprocess
import sys

import pytest

from hvd_keras import postmortem
from hvd_keras.launch import run_job
from tests.harness import ranks

KILLED = """
import multiprocessing, os, signal
import numpy as np
import hvd_keras as hvd

hvd.init()
hvd.remove_process_set(hvd.add_process_set([1]))  # is no rank that leaves
for step in range(250):
    hvd.allreduce(np.full(1, 1 + hvd.rank(), "float32"), name=f"step {step}")
if hvd.rank() == 1:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(int)  # its worker has begun, and is terminated
    os.kill(os.getpid(), signal.SIGKILL)
hvd.broadcast(np.ones(3), 0, name="last")
"""


def test_requests_outlive_kill_9(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "postmortem"
    folder.mkdir()
    larger = folder / "rank-2.requests"  # of an earlier job, or of one beside this
    head = postmortem._HEAD.pack(postmortem._MAGIC, 2, 3, 0, b"", b"")
    larger.write_bytes(head.ljust(postmortem.FILE_BYTES, b"\0"))
    job = ranks.run_script(tmp_path, 2, KILLED, HVD_POSTMORTEM=str(folder))
    assert job.status != 0
    assert larger.exists()
    ranks_there = postmortem.read(folder)
    assert [*ranks_there] == [0, 1]
    killed = ranks_there[1]
    steps = [request for request in killed.requests if "step" in request.identity]
    assert [request.identity for request in steps] == [
        f"allreduce 'step {step}'" for step in range(250 - len(steps), 250)
    ]
    assert 195 <= len(steps) <= len(killed.requests) == 200
    assert {(r.bytes, postmortem.STATES[r.state], r.process_set) for r in steps} == {(4, "done", 0)}
    assert all(0 < r.submitted <= r.started <= r.ended for r in steps)
    assert (killed.has_stacks, killed.leaving) == (False, "")
    # Its room on the disk was taken at the start: a full disk is no SIGBUS later.
    file = (folder / "rank-1.requests").stat()
    assert file.st_blocks * 512 >= file.st_size > 0

    command = [sys.executable, "-m", "hvd_keras.postmortem", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("rank 1 was killed or ended without a message")
    assert "in <module>: hvd.allreduce(np.full(" in told.splitlines()[1]
    assert "  allreduce 'step 249', 4 B: done, " in told.partition("\nrank 1 on ")[2]

    (folder / "rank-0.requests").unlink()  # as if its host were lost
    assert postmortem.conclusion(folder).startswith("rank 0 has left no files")


def test_a_rank_that_fails_after_others_have_ended_well(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "postmortem"
    script = """
        import hvd_keras as hvd
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            raise ValueError("evaluation failed")
        """
    job = ranks.run_script(tmp_path, 2, script, HVD_POSTMORTEM=str(folder))
    assert job.status != 0
    told = postmortem.conclusion(folder)
    assert told.startswith("rank 1 left the job (ValueError: evaluation failed)"), told


@pytest.mark.parametrize(("name", "end"), [("a", "SIGKILL"), ("auto.turn", "SIGTERM")])
def test_a_rank_is_no_cause_by_computing_while_another_one_waits_and_ends(hvdrun, name, end):
    """One that was killed, or a worker of --auto, which waits for the script as a rule."""
    script = f"""
        import os, signal, threading, time
        import numpy as np
        import hvd_keras as hvd
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 0:
            time.sleep(1000)
        threading.Timer(1, os.kill, [os.getpid(), signal.{end}]).start()
        hvd.allreduce(np.full(1, 1 + hvd.rank()), name={name!r})
        """
    told = hvdrun.python(2, script).stderr
    assert f"rank 1 failed first: killed by {end}" in told
    assert "waited for" not in told


def test_folders_that_hold_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "start-1").mkdir()
    (tmp_path / "start-1" / "rank-0.requests").write_bytes(b"of another version")
    with pytest.raises(ValueError, match=r"has no files rank-N.requests, but its folders start-1 "):
        postmortem.read(tmp_path)
    with pytest.raises(ValueError, match="is not of this version of hvd_keras"):
        postmortem.read(tmp_path / "start-1")
    (tmp_path / "rank-0.requests").mkdir()
    assert run_job._conclusion(tmp_path).startswith("postmortem: [Errno 21] Is a directory")


def test_folders_that_cannot_be_written(hvdrun) -> None:
    file = hvdrun.folder / "file"
    file.touch()
    done = hvdrun.run("-np", "1", "--postmortem", str(file), "true", status=2)
    assert f"--postmortem got {str(file)!r}, where no folder can be made: " in done.stderr
