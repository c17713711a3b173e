"""What runs on the hosts of a job, beside the ranks; it imports the standard library alone."""
