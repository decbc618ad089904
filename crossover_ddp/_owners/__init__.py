"""Owners of parameters: their choice, the buffers to and from them, the state that they keep.

Shared by K-FAC, Muon and `OwnerState`.
"""
