"""Code that runs on the hosts of a job, beside the ranks; it uses the standard library only."""
