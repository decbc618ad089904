"""Predicts the step time on a link: a cost model, and a probe that measures the link."""
