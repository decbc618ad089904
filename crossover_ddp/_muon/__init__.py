"""Muon with each matrix on one owner; see `crossover_ddp.muon_hooks`."""
