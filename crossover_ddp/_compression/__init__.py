"""Compression as a stage of both halves: codecs, error feedback, and the messages of one bucket."""
