"""How long hvdrun waits for what, in seconds.

The clean-up's limits are in `sweep`, which runs alone on hosts.
"""

from __future__ import annotations

# Asking hosts

# Until a host that does not answer counts as unreachable, in one try; hvdrun, in all tries.
CONNECT_TIMEOUT = 5
REACH_TIMEOUT = 30.0

# For the answer of a host, a discovery script or `mpirun --version`: loading a program may take
# long on a slow network file system.
ANSWER_TIMEOUT = 60.0

# For SLURM's answers, and until a node is free for a short command.
NODE_TIMEOUT = 10

# Until the other end must have proved that it knows the secret.
PROOF_TIMEOUT = 10.0

# Between ssh's keep-alives, and how many may be missed: a network failure of 5 s is tolerated, and
# SILENCE detects a longer one earlier.
ALIVE_INTERVAL = 4
ALIVE_COUNT = 3

# While the job runs

# Between two looks at what does not wake hvdrun up.
CHECK = 1.0

# Between two looks of a worker whether hvdrun's host and mpirun's daemon still live, and between
# two of its signs of life.
WORKER_CHECK = 0.5
WORKER_ALIVE = 5.0

# Until a silent host counts as lost. After a network failure of 5 s, TCP may need up to 7, because
# it backs off between its retries.
SILENCE = 10.0

# Without a sign of life, until a worker counts as stopped when others have ended.
MUTE = 60.0

# That an unfinished line waits for its rest: short enough for a prompt or a progress bar.
PARTIAL_LINE_DELAY = 0.1

# Between two looks at a slow reader of our output, two tries to read a terminal that belongs to
# another job of the shell, and two versions of the screen.
SLOW_READER_CHECK = 0.1
BACKGROUND_WAIT = 1.0
SCREEN_REFRESH = 1.0

# The end

# From the request to end until the kill, where --stop-timeout does not count: enough to flush and
# close files.
GRACE = 5.0

# For a rank that another one has said to leave.
DESERTER_GRACE = 30.0

# By which the report of a failure may arrive after mpirun has killed other ranks for it.
TIE = 1.0

# Beyond the ranks' time to end, in which their workers kill them and report it; for mpirun after
# the last rank is over; for what mpirun and the workers have left.
KILL_GRACE = 2.0
OVER_GRACE = 1.0
SWEEP_GRACE = 1.0

# That the output of a command which has ended may keep us, because a daemon may hold it open.
DRAIN = 1.0

# On a host with an agent: until hvdrun, whose owner was killed, has ended its job by itself.
HVDRUN_END = 4 * GRACE

# Restarts

# Between two looks at the hosts: while too few answer, and before the first start, when nothing
# else runs.
LOOK_AGAIN = 5.0
WAIT_AGAIN = 1.0

# A start that ends so soon is followed by a pause, from the second time on; each pause is twice as
# long as the one before.
QUICK = 10.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
