"""Turns on a device: one job computes while its siblings exchange gradients; see docs/turns.md.

Each module has one task:

- `rules` makes the decisions, without a clock or I/O; the exhaustive model runs the same functions
- `segment` holds the data that a machine's processes share: slots, the log of turns, and bells
- `channel` carries turns between the ranks of one job
- `device_order` finds out when a GPU has finished a turn
- `joining` creates these three, on all ranks of a job or on none
- `turns` runs one rank's thread, which draws turns, waits for them and gives them back
- `view` shows the turns of all jobs from outside
"""
