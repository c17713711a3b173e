"""``HVD_AUTO=brain``: the first rank runs the script, the others compute their rows of its steps.

``places`` says where a tensor is, ``rules``, ``layout`` and ``loops`` what each op does to that,
``sizes`` and ``shapes`` what a step computes from the number of rows. ``plan`` places all ops of a
step, ``emit`` builds each rank's graph, ``run`` sends and runs them, ``hook`` finds the steps.
"""

from hvd_keras.auto.brain.start import is_on, join

__all__ = ["is_on", "join"]
