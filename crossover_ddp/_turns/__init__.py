"""Turns on a device: one job computes while its siblings exchange gradients; see docs/turns.md.

Each module has one part:

- `rules` decides, without a clock or I/O; the exhaustive model runs the same functions
- `segment` holds what processes of one machine share: slots, the log of turns, and bells
- `channel` carries turns between the ranks of one job
- `device_order` finds out when a GPU has finished a turn
- `joining` makes these three, on all ranks of a job or on none
- `turns` is one rank's thread, which draws turns, waits for them and gives them back
- `view` shows the turns of all jobs, from outside
"""
