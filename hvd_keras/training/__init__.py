"""Training a Keras model on several ranks: optimizer, tape, fit, metrics, checkpoints.

All code that knows Keras 3 is here; support for older scripts is in ``compat``.
"""
