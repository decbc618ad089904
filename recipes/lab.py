import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lab_cluster import Cluster, clean  # noqa
from lab_jobs import Job, RunResult, JobFailedError, RunTimeoutError  # noqa
