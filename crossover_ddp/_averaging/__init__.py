"""Replicas that do not wait for each other: parameters averaged now and then, late, or elastically."""
