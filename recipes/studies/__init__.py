"""The claims of docs/measurements.md: ``python recipes/studies/run.py --list``."""
