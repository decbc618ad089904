"""Predicts the step time on a link: a cost model, and a probe that measures the link.

Not here: the plans of single hooks, which their states make, and pipelines
(`crossover_ddp.pipeline`).
"""
