"""Journeys of tensors between the ranks of one process group: coroutines over collectives, and what carries them.

A journey, such as a bucket's, is a coroutine over a `links.Link`, whose collectives are all that there is between
ranks. `exchange.Exchange` starts journeys and brings back what became of them; `journeys` lets them go from thread to
thread; `links` and `device` hold links and the networks that make them; `states` is what states of hooks share.
"""
