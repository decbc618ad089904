"""The engine: journeys of tensors between the ranks of one process group.

- `journeys`: a coroutine under way, gates, threads that resume journeys, and the CPU as a device
- `links`: the collectives of a journey, and the networks of one rank and of gloo
- `device`: CUDA devices, the network of NCCL, and CUDA tensors over gloo
- `buckets`: the buckets of a backward pass, their failures, and the turn of a journey
- `exchange`: starts journeys, fails them and closes them
- `observe`: meters, records of steps, the timeline, and hooks around ``optimizer.step()``
- `states`: the base of the states of all hooks

Not here: the hooks' coroutines, which stand at the top of the public modules; the protocol of turns
(`_turns`), of which the engine knows three calls; codecs (`_compression`).
"""
