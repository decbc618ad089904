"""Compression of gradients: codecs, error feedback, and the messages of one bucket."""
