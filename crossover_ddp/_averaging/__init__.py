"""Replicas that train on their own gradients: parameters averaged at intervals, or elastically."""
