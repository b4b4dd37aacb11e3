"""`python -P -m rlt.decode '<WorkerConfig as JSON>'`: one decode worker process."""

import sys

from ..connector.process import run_worker
from .engine import DecodeEngine

if __name__ == "__main__":
    sys.exit(run_worker(DecodeEngine, sys.argv[1:]))
