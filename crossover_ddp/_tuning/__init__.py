"""Predicts the step time on a link, with a cost model and a probe that measures the link.

Not here: the plans for single hooks, which the hooks' states make, and plans for pipelines
(`crossover_ddp.pipeline`).
"""
