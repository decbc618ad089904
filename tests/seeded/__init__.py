"""Faults to seed into a copy of the tree, each with tests of ``make test`` that must fail then.

    python -m tests.seeded                 # all faults
    python -m tests.seeded _decoupled      # faults with this in their file or reason

After a change of the suite, this shows that it still finds the same mistakes. See `fault`.
"""
