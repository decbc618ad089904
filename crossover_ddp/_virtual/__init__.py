"""The parts of `VirtualRanks`.

They are a tree over virtual ranks, the gradients of earlier micro-batches, the model's buffers
during a step, and samples and random numbers that do not depend on the number of ranks.
"""
