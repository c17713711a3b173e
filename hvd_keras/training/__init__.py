"""Training a Keras model on several ranks: optimizer, tape, fit, metrics, checkpoints.

What knows Keras 3 is here, and nothing else; older programs are in ``compat``.
"""
