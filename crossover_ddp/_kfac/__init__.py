"""K-FAC inside the gradient exchange. A bucket's journey is in `crossover_ddp.kfac_hooks`.

The modules, in the order in which a step uses them:

- `settings`, `layers`, `placement`: checks, the layers that K-FAC can treat, and their owners
- `capture`: hooks that record the factors of this rank's mini-batch
- `factors`: the mathematics of the factors
- `preconditioner`: prepares each step and packs each bucket, on the hook's thread
- `step`: the state of one backward pass, and the packed buckets
- `factor_traffic`: the journey of the factors to their owners
- `curvature`: running factors and solvers, on the owner
- `spread`: solvers for layers that all ranks precondition together
"""
