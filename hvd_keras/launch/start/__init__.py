"""Which hosts take the ranks, and the commands that start them there: mpirun, srun and ssh."""
