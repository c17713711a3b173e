"""What hvdrun has while the ranks run: output, statistics, signals, the judgement of the end."""
