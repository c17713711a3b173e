"""How long hvdrun waits for what, in seconds.

The clean-up's limits are in `sweep`, which runs alone on hosts.
"""

# Asking hosts

CONNECT_TIMEOUT = 5  # until a host that does not answer counts as unreachable, in one try
REACH_TIMEOUT = 30.0  # the same for hvdrun, in all tries
# For the answer of a host, a discovery script or `mpirun --version`: loading a program may take
# long on a slow network file system.
ANSWER_TIMEOUT = 60.0
NODE_TIMEOUT = 10  # for SLURM's answers, and until a node is free for a short command
PROOF_TIMEOUT = 10.0  # until the other end must have proved that it knows the secret
# Between ssh's keep-alives, and how many may be missed: a network failure of 5 s is tolerated, and
# SILENCE detects a longer one earlier.
ALIVE_INTERVAL, ALIVE_COUNT = 4, 3
# The same of Open MPI's daemons, which end when they are cut off; idle time first.
DAEMON_IDLE, DAEMON_INTERVAL, DAEMON_COUNT = 4, 2, 4
PROBE_INTERVAL = 1  # between TCP's keep-alives of hvdrun's own connections
TRY_AGAIN = 0.5  # between a worker's tries to reach hvdrun

# While the job runs

CHECK = 1.0  # between two looks at what does not wake hvdrun up
WORKER_CHECK = 0.5  # between a worker's looks whether hvdrun's host and mpirun's daemon still live
ALIVE_CHECKS = 10  # the looks from one sign of life to the next
WORKER_ALIVE = WORKER_CHECK * ALIVE_CHECKS
# Until a silent host counts as lost. After a network failure of 5 s, TCP may need up to 7, because
# it backs off between its retries.
SILENCE = 10.0
SUSPICION = SILENCE / 3  # until nobody waits for it any more
MUTE = 60.0  # without a sign of life, until a worker counts as stopped when others have ended
# That an unfinished line waits for its rest: short enough for a prompt or a progress bar.
PARTIAL_LINE_DELAY = 0.1
LONG_LINE_DELAY = 2.0  # that one in long output waits for it
SLOW_READER_CHECK = 0.1  # between two looks at a slow reader of our output

# The end

# From the request to end until the kill, where --stop-timeout does not count: enough to flush and
# close files.
GRACE = 5.0
DESERTER_GRACE = 30.0  # for a rank that another one has said to leave
TIE = 1.0  # the report of a failure may arrive so late after mpirun has killed other ranks for it
# Beyond the ranks' time to end, in which their workers kill them and report it; for mpirun after
# the last rank is over; for what mpirun and the workers have left.
KILL_GRACE, OVER_GRACE, SWEEP_GRACE = 2.0, 1.0, 1.0
DRAIN = 1.0  # a daemon may hold the output of a command open that has ended, which we read so long

# Restarts

LOOK_AGAIN = 5.0  # between two looks at the hosts while too few answer
WAIT_AGAIN = 1.0  # the same before the first start and after the end, when nothing else runs
# A start that ends so soon is followed by a pause, from the second time on; each pause is twice as
# long as the one before.
QUICK, FIRST_PAUSE, LONGEST_PAUSE = 10.0, 1.0, 60.0

# From a rank's hvd.init() until the server of its host imports the same: a script that fails early
# will fail again. Unused for the second, the server ends. A rank starts anew if it has no answer
# after the third, or after the fourth if the server was just started, by HVD_KEEP_IMPORTS.
SERVER_DELAY, SERVER_IDLE, SERVER_ANSWER, SERVER_START = 5.0, 240.0, 5.0, 300.0
