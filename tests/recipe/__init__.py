"""The recipe "Adding a collective" of CONTRIBUTING.md, carried out by a program.

The collective is a toy: ``shift`` gives every rank the tensors of its left neighbour. ``make
recipe-test`` adds it to a copy of the sources, builds the copy and runs ``job.py`` on it.
tests/unit/test_recipe.py checks in every run that the recipe's places still exist.
"""
