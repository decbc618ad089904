"""Choose the owners of parameters, lay out the buffers sent to and from them, and keep their state.

`optimizer` takes an optimizer's step in parts. K-FAC, Muon, `OwnerState` and `DecoupledState` share
this package. It does not decide when an owner computes: the hooks' coroutines do.
"""
