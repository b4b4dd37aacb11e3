"""`python -P -m rlt.coordinator '<CoordinatorConfig as JSON>'`: the coordinator's process.

Exit codes: 0 told to stop, 1 failed while serving, 2 could not start.
"""

import logging
import sys

import msgspec
import uvloop

from ..runtime.errors import CheckpointError, ConfigError, RltError, ServiceError
from .config import CoordinatorConfig
from .runtime_dir import held_runtime_dir
from .service import serve
from .text import load_tokenizer

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    try:
        config = msgspec.json.decode(arguments[0], type=CoordinatorConfig)
    except (IndexError, msgspec.MsgspecError, RltError) as error:
        print(f"error: bad coordinator configuration: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s coordinator %(message)s"
    )
    try:
        with held_runtime_dir(config.runtime_dir) as folder:
            tokenizer = load_tokenizer(config.model)
            if tokenizer is None:
                logger.warning("no tokenizer in %s: token IDs only", config.model)
            uvloop.run(serve(config, folder, tokenizer))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
