"""`python -P -m rlt.prefill '<WorkerConfig as JSON>'`: one prefill worker process."""

import sys

from ..connector.process import run_worker
from .engine import PrefillEngine

if __name__ == "__main__":
    sys.exit(run_worker(PrefillEngine, sys.argv[1:]))
