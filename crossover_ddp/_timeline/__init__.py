"""Record when jobs computed and communicated; merge, measure and draw the recordings.

Not here: the calls that record a journey (`_engine.observe`).
"""
