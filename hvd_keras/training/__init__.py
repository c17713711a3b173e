"""The state of a training: its variables, metrics, layers, and the ``fit`` that runs."""
