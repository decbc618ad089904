"""The claims of docs/measurements.md, and one runner that shows them: ``python recipes/studies/run.py --list``."""
