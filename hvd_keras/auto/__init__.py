"""Automatic mode: ``hvdrun --auto train.py`` divides what a script of one process computes.

The first rank runs the script, and the others compute their rows of its steps. ``places`` says
where a tensor is, ``rules``, ``layout`` and ``loops`` what each op does to that, ``sizes`` and
``shapes`` what a step computes from the number of rows. ``plan`` places all ops of a step, ``emit``
builds each rank's graph, ``run`` sends and runs them, ``hook`` finds the steps.
"""
