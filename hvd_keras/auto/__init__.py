"""Automatic mode: ``hvdrun --auto train.py`` divides what a script of one process computes.

Global batch, learning rate and results stay as written; what cannot be had that way is an error.
"""
