"""K-FAC on the gradient's own buckets: factors, solvers, owners, and how they travel."""
