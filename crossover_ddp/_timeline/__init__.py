"""Records when jobs computed and communicated, and reads the recordings.

The calls that record a journey are in `_engine.observe`.
"""
