"""Faults to seed into a copy of the tree, and the tests of ``make test`` that must go red of each.

    python -m tests.seeded                 # all of them
    python -m tests.seeded _decoupled      # those whose file or reason has this in it

Whoever shortens the suite shows with it that the suite still sees what it saw. See `fault`.
"""
