"""K-FAC inside the gradient exchange. A bucket's journey is in `crossover_ddp.kfac_hooks`.

The modules, in the order in which a step uses them:

- `settings`, `layers`, `placement`: checks, the layers that K-FAC can treat, and their owners
- `factors`: hooks that record the factors of this rank's mini-batch, and the factors' journeys
- `preconditioner`: prepares each step and packs each bucket, on the hook's thread
- `curvature`: the mathematics of one layer: factors, running means, solvers and directions
"""
