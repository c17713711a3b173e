"""Runs scripts on PyTorch."""


def run(hvdrun, size, script):
    hvdrun.environment["KERAS_BACKEND"] = "torch"
    job = hvdrun.python(size, script)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout
