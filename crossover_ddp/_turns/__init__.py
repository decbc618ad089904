"""Turns on a device: one job computes, its siblings exchange; see docs/turns.md.

`rules` decides, without a clock or I/O, and is what the exhaustive model runs. `turns` is one rank's thread; it reads
and writes a `segment` of shared memory, files and doorbells that a fork must not keep, hears of its job's turns through
the `channel`, and on a GPU ends turns by the `device_order`. `joining` makes all of them, on all ranks or on none.
`view` looks from outside.
"""
