"""What starts ranks: hosts, networks, and the command lines of mpirun, srun and ssh."""
