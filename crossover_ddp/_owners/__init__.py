"""Owners of parameters: their choice, the buffers to and from them, the state that they keep.

`optimizer` takes an optimizer's step in parts. Shared by K-FAC, Muon, `OwnerState` and
`DecoupledState`. Not here: when an owner computes, which the hooks' coroutines decide.
"""
