"""Compression of gradients: codecs, error feedback, and the messages of one bucket.

A coded link wraps a link of the engine, so that every hook can have a codec. Not here: the journey
of a compressed bucket and its hook (`crossover_ddp.codecs`).
"""
