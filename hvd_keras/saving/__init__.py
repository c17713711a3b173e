"""The files of models and checkpoints."""
