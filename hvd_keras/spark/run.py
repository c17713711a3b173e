"""``hvd.spark.run``: a function on ranks that Spark's executors start.

Each rank has a task of a barrier stage. The first one runs hvdrun, the others wait for it. Each
holds a connection to the driver, over which it is granted its start and reports its end, so that
the driver sees which one was lost first, and no task of a stage that Spark repeats starts.
"""

import contextlib
import dataclasses
import functools
import json
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_keras import agents
from hvd_keras.agents.link import Link, listening
from hvd_keras.launch.onhost.channel import ProtocolError, new_secret

# Seconds to wait for free slots, unless the user says otherwise.
START_TIMEOUT = 120.0

# Seconds between two looks at the job, and until its slots are asked for again.
CHECK = 0.2

# Seconds in which Spark may itself tell the cause of a failure before the job is cancelled.
PATIENCE = 5.0

# Seconds for a task to reach the driver.
CONNECT_TIMEOUT = 10.0

# What hvdrun prints before the lines of rank 0, whose progress the driver shows.
FIRST_RANK = "[0] "

# Settings by which a cluster encrypts what its processes send each other, or write, and what a job
# would leave readable.
_SENT = "what Spark sends, but MPI sends gradients unencrypted, and rank 0's output travels so, too"
_WRITTEN = (
    "what Spark writes, but the function, its arguments and the results lie in the executors' "
    "temporary folders for a while"
)
ENCRYPTION = {
    "spark.network.crypto.enabled": _SENT,
    "spark.authenticate.enableSaslEncryption": _SENT,
    "spark.ssl.enabled": _SENT,
    "spark.ssl.rpc.enabled": _SENT,
    "spark.io.encryption.enabled": _WRITTEN,
}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    max_restarts: int = 0,
    min_num_proc: int | None = None,
    allow_unencrypted: bool = False,
) -> list[Any]:
    """Call a function on ranks on Spark's executors, one rank per task of a barrier stage.

    The driver prints the output of rank 0; that of all ranks is in the executors' logs. The
    function calls ``hvd.init()`` itself. Function, arguments and results are pickled by
    cloudpickle; what they import must be installed on all hosts.

    Args:
        fn: the function.
        args: its positional arguments, equal on all ranks.
        kwargs: its keyword arguments, equal on all ranks.
        num_proc: number of ranks. Default: ``SparkContext.defaultParallelism``.
        start_timeout: seconds to wait for free slots for all ranks. Default: 120.
        env: further environment variables for the ranks.
        options: further options of hvdrun, such as ``["--network-interface", "10.0.0.0/8"]``.
        max_restarts: maximum number of restarts after a failure, each in a new stage.
        min_num_proc: minimum number of ranks of a restart. Default: ``num_proc``.
        allow_unencrypted: whether to run although Spark encrypts its own traffic or files: MPI
            does not encrypt the gradients, nor hvdrun its temporary files.

    Returns:
        The list of the results of all ranks, in rank order.

    Raises:
        ValueError: no SparkContext is active; too few slots are free; an executor has another
            version of Python or of a package; or the function cannot be pickled.
        RuntimeError: the job failed or was cancelled; the text has the traceback of the rank that
            failed first, or names the lost task.

    Example:
        def train(rate):
            import hvd_keras as hvd
            hvd.init()
            return hvd.rank(), rate * hvd.size()

        assert hvd.spark.run(train, (0.1,), num_proc=2) == [(0, 0.2), (1, 0.2)]
    """
    import cloudpickle

    context = _active_context()
    _check_settings(context, allow_unencrypted)
    size = context.defaultParallelism if num_proc is None else num_proc
    if size < 1 or not 1 <= (min_num_proc or size) <= size or max_restarts < 0:
        raise ValueError(
            f"hvd.spark.run: {num_proc=}, {min_num_proc=}, {max_restarts=}; expected at least 1 "
            "rank, min_num_proc of 1 to num_proc, and 0 or more restarts"
        )
    try:
        function = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise ValueError(
            f"hvd.spark.run: the function or its arguments cannot be pickled: {error}; expected "
            "that it makes models, files, sessions and locks itself, on each rank"
        ) from error
    cores = int(context.getConf().get("spark.task.cpus", "1"))
    call = agents.Call("hvd.spark.run", cores, list(options), dict(env or {}))
    timeout = START_TIMEOUT if start_timeout is None else start_timeout
    least, restarts = size, 0
    while True:
        ranks = _await_slots(context, least, size, timeout)
        try:
            results = _start(context, call, function, ranks, timeout)
            break
        except RuntimeError as error:
            if restarts == max_restarts or isinstance(error, CancelledError):
                raise
            restarts += 1
            print(f"{error}\nhvd.spark.run: restart {restarts} of {max_restarts}")
            least = min_num_proc or size
    return [cloudpickle.loads(result) for result in results]


class CancelledError(RuntimeError):
    """A user has ended the job, so it is not restarted."""


class Tasks:
    """The tasks of one barrier stage, as their connections show them."""

    def __init__(self) -> None:
        self.started: set[int] = set()  # those that were granted their start
        self.ended: set[int] = set()  # those that ended well
        self.failure = ""  # how the first of the others ended; empty while none has
        self._lock = threading.Lock()

    def follow(self, link: Link, hello: dict[str, Any]) -> None:
        """Let a task start, unless it was granted before, and note how it ends."""
        number = hello["task"]
        with self._lock:
            if number in self.started or self.failure:
                return
            self.started.add(number)
        with contextlib.suppress(OSError):
            link.send(go=True)
        ending = f"task {number} on {hello['host']} was lost, or its executor"
        while message := link.receive():
            if "line" in message:
                print(message["line"], end="", flush=True, file=getattr(sys, message["to"]))
            elif "error" in message:
                ending = f"task {number} on {hello['host']} failed:\n{message['error']}"
            else:
                self.ended.add(number)
        with self._lock:
            if number not in self.ended and not self.failure:
                self.failure = ending


class HorovodRunner:
    """Databricks' class of this name, over ``hvd.spark.run``.

    Args:
        np: number of ranks on the executors; 0: one per slot; negative: ``-np`` ranks
            on the driver's host.
        driver_log_verbosity: accepted, without effect: rank 0's output is printed.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        self.np = np

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on all ranks and return the result of rank 0.

        Raises:
            As ``hvd.spark.run``.
        """
        if self.np < 0:
            from hvd_keras.launch import run_function

            options = ["--oversubscribe"]
            return run_function.run(main, (), kwargs, np=-self.np, options=options)[0]
        return run(main, kwargs=kwargs, num_proc=self.np or _slots(_active_context()))[0]


def _active_context() -> Any:
    try:
        from pyspark import SparkContext
    except ImportError as error:
        raise ValueError("hvd.spark.run needs pyspark; run: pip install pyspark") from error
    context = SparkContext._active_spark_context
    if context is None or _is_stopped(context):
        raise ValueError(
            "hvd.spark.run: no SparkContext is active; expected a session of this process "
            "(SparkSession.builder.getOrCreate()), and not one of Spark Connect"
        )
    return context


def _is_stopped(context: Any) -> bool:
    java = context._jsc
    return java is None or java.sc().isStopped()


def _check_settings(context: Any, allow_unencrypted: bool) -> None:
    """Raise ValueError if a setting of the cluster forbids the job."""
    settings = context.getConf()
    encrypted = [name for name in ENCRYPTION if settings.get(name, "false").lower() == "true"]
    if encrypted and not allow_unencrypted:
        without = "; ".join(f"{name} encrypts {ENCRYPTION[name]}" for name in encrypted)
        raise ValueError(
            f"hvd.spark.run: {without}. If nobody else can read the network and the disks, pass "
            "allow_unencrypted=True"
        )
    if settings.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise ValueError(
            "hvd.spark.run: spark.dynamicAllocation.enabled is true, with which Spark has no "
            "barrier stages; expected false"
        )


def _slots(context: Any) -> int:
    """How many tasks the present executors can run at once."""
    # PySpark has no public way to ask; Spark itself checks barrier stages by this.
    spark = context._jsc.sc()
    profile = spark.resourceProfileManager().defaultResourceProfile()
    return int(spark.maxNumConcurrentTasks(profile))


def _await_slots(context: Any, least: int, size: int, timeout: float) -> int:
    """Wait until the executors have slots for ``least`` ranks; return for how many of ``size``."""
    limit = time.monotonic() + timeout
    while (slots := _slots(context)) < least:
        if time.monotonic() > limit:
            raise ValueError(
                f"hvd.spark.run: {least} ranks need {least} slots, but Spark's executors have "
                f"{slots} after {timeout:.0f} s (start_timeout). Use fewer ranks, add executors or "
                "cores, or lower spark.task.cpus"
            )
        time.sleep(CHECK)
    return min(size, slots)


def _start(
    context: Any, call: agents.Call, function: bytes, ranks: int, timeout: float
) -> list[bytes]:
    """Run one barrier stage; return the ranks' pickled results. Raises as ``run``."""
    from pyspark import InheritableThread

    host = context.getConf().get("spark.driver.host")
    call = dataclasses.replace(call, secret=new_secret())
    tasks = Tasks()
    found: list[list[bytes] | Exception] = []  # what the first task returns
    reasons: list[str] = []  # of the stage's failure
    tag = f"hvd-{call.run}-{secrets.token_hex(4)}"
    address = context.getConf().get("spark.driver.bindAddress", host)
    with listening(address, call.secret, tasks.follow) as port:
        work = functools.partial(_work, call, function, (host, port))

        def submit() -> None:
            try:
                context.addJobTag(tag)  # and not a group, so that the caller's cancels this, too
                context.setInterruptOnCancel(True)
                context.setJobDescription(f"hvd.spark.run on {ranks} ranks")
                places = context.parallelize(range(ranks), ranks).barrier()
                found.extend(places.mapPartitions(lambda _: work()).collect())
            except Exception as error:  # what py4j raises has no common class
                reasons.append(str(error))

        stage = InheritableThread(target=submit, daemon=True)
        stage.start()
        try:
            problem = _watch(stage, tasks, time.monotonic() + timeout)
        finally:
            if stage.is_alive() and not _is_stopped(context):
                context.cancelJobsWithTag(tag)
                stage.join(PATIENCE)
    if found:
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]
    if _is_stopped(context):  # which also loses its executors
        raise CancelledError("hvd.spark.run: the SparkContext was stopped")
    raise problem or _reason(reasons[0], tasks)


def _watch(stage: threading.Thread, tasks: Tasks, limit: float) -> Exception | None:
    """Wait for the end of the stage; return why it must be cancelled, or None if it has ended."""
    failed = float("inf")
    while stage.is_alive():
        stage.join(CHECK)
        now = time.monotonic()
        if not tasks.started and now > limit:
            return ValueError(
                "hvd.spark.run: no slots became free within start_timeout; other jobs of this "
                "application, or of the cluster, use them. Expected that they end, or a larger "
                "start_timeout"
            )
        if tasks.failure:
            failed = min(failed, now)
            if now > failed + PATIENCE:
                return RuntimeError(f"hvd.spark.run: {tasks.failure}")
    return None


def _reason(text: str, tasks: Tasks) -> Exception:
    """Return what a user wants to know of the end of a stage that has failed with this text."""
    if re.search(r"Job \d+ cancelled", text):
        return CancelledError("hvd.spark.run: the Spark job was cancelled")
    if tasks.failure:
        return RuntimeError(f"hvd.spark.run: {tasks.failure}")
    if lines := re.findall(
        r"^(?:[\w.]*Error: .*|.*PYTHON_VERSION_MISMATCH.*)$", text, re.MULTILINE
    ):
        return ValueError(
            f"hvd.spark.run: an executor cannot load the call: {lines[-1]}; expected hvd_keras and "
            "the driver's version of Python there (see PYSPARK_PYTHON)"
        )
    return RuntimeError(f"hvd.spark.run: {text}")


def _show(link: Link, line: str, name: str) -> None:
    """Show the lines of rank 0 to the driver, and all lines in the executor's log."""
    print(line, end="", flush=True, file=sys.stderr)
    if line.startswith(FIRST_RANK):
        with contextlib.suppress(OSError):  # the driver is gone, and Spark ends the task
            link.send(line=line.removeprefix(FIRST_RANK), to=name)


def _work(
    call: agents.Call, function: bytes, driver: tuple[str, int]
) -> list[list[bytes] | Exception]:
    """Take part in a call of a function that is pickled with its arguments.

    Returns the ranks' results in the first task, or why the call failed; nothing in the others.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    try:
        connection = socket.create_connection(driver, CONNECT_TIMEOUT)
        link = Link(connection, call.secret, listens=False)
    except (OSError, ProtocolError) as error:
        raise RuntimeError(
            f"{socket.gethostname()} cannot connect to the driver at {driver[0]}: {error}; "
            "check that no firewall blocks its ports and that spark.driver.host is right"
        ) from error
    try:
        link.send(task=number, host=socket.gethostname())
        if link.receive() is None:
            raise RuntimeError("Spark has repeated the stage; its ranks are started once only")
        address = context.getTaskInfos()[number].address.rpartition(":")[0]
        with contextlib.closing(agents.Agent(call, address)) as agent:
            gathered = context.allGather(json.dumps(agent.facts()))
            places = [json.loads(text) for text in gathered]
            found: list[list[bytes] | Exception] = []
            if number == 0 and (problem := call.problem(places)):
                found = [ValueError(f"{call.name}: {problem}")]
            elif number == 0:
                found = [call.start(function, places, show=functools.partial(_show, link))]
            context.barrier()
        link.send(done=True)
        return found
    except Exception:
        with contextlib.suppress(OSError):
            link.send(error=traceback.format_exc())
        raise
    finally:
        link.close()
