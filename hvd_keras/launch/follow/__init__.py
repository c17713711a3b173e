"""What hvdrun does while the ranks run: connections, output, input, and the outcome."""
