"""What a process needs before it can move a byte: libraries, settings, ranks, process sets."""
