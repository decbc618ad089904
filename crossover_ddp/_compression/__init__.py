"""Gradient compression: codecs, error feedback, and the messages of a bucket.

A coded link wraps one of the engine's links, so any hook can use a codec. The journey of a
compressed bucket and its hook are in `crossover_ddp.codecs`.
"""
