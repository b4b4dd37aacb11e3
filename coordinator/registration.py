"""What a worker's Register must say to be possible at all. Pure.

Routing divides by these numbers and promises memory by them, so one worker's nonsense would be
everybody's: it is refused before it is anybody's.
"""

from ..connector.geometry import check_pool
from ..connector.messages import Register
from ..runtime.errors import ProtocolError
from .generations import MAX_EPOCH, epoch_of

MAX_PID = 2**31 - 1  # the operating system's; a larger one cannot even be asked about


def registration_fault(message: Register) -> str | None:
    """Why these figures cannot be a worker's; None when they can."""
    try:
        check_pool(message.pool)
    except ProtocolError as error:
        return str(error)
    if not 1 <= message.pid <= MAX_PID:
        return f"no process has the ID {message.pid}: there are 1 to {MAX_PID}"
    epochs = [message.highest_epoch, *map(epoch_of, message.live)]
    if not all(0 <= epoch <= MAX_EPOCH for epoch in epochs):
        return f"it has seen an epoch that cannot be: {max(epochs)}"
    model, limits, pool = message.model, message.limits, message.pool
    if not (
        1 <= limits.num_blocks <= pool.num_blocks
        and limits.num_slots >= 1
        and limits.num_receive_slots >= (message.role == "decode")
        and limits.max_positions >= 1
    ):
        return f"its limits {limits} are not those of {pool.num_blocks} blocks"
    if not (
        model.num_loops == pool.geometry.num_depths
        and model.vocab_size >= 1
        and model.max_positions >= 1
        and 0.0 <= model.default_exit_threshold <= 1.0
    ):
        return f"it describes a model that cannot be: {model}"
    return None
