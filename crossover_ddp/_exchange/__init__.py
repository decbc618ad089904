"""One bucket's exchange between ranks: an engine, its three ways (alone, ring, native), and what travels."""
