"""Everything hvdrun does while the ranks run: connections, output, input, judging the outcome."""
