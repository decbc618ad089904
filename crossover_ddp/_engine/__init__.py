"""The engine: journeys of tensors between the ranks of one process group.

- `journeys`: journeys, gates, threads that resume journeys, and the CPU as a device
- `links`: the collectives of a journey, and the networks for a single rank and for gloo
- `device`: CUDA devices, the network for NCCL, and CUDA tensors over gloo
- `networks`: the networks of a process group, one for each device
- `buckets`: the buckets of backward passes, their checks, contents and failures, the turn in a
  journey, and the data that travel behind a step's last bucket
- `exchange`: starts journeys, fails them and closes them
- `observe`: meters, records of steps, the timeline, and hooks around ``optimizer.step()``
- `states`: the base class of all hook states

Not here: the hooks' coroutines, which are at the top of the public modules; the protocol of turns
(`_turns`), of which the engine knows three calls; and codecs (`_compression`).
"""
