"""Every error rlt raises on purpose. The class says how far the damage reaches.

`code` is stable and travels to clients; the message says where, with which values, and what to do.
"""


class RltError(Exception):
    code = "internal"


class RequestError(RltError):
    """One request ends with this error; everything else goes on."""


class WorkerError(RltError):
    """One worker cannot go on; its requests end, the others serve."""

    code = "worker_failed"


class ServiceError(RltError):
    """The service cannot start or must stop."""

    code = "service_failed"


class InvalidRequest(RequestError):
    """A field is malformed or out of range."""

    code = "invalid_request"


class TooLong(RequestError):
    """The request can never fit the model or the pool."""

    code = "too_long"


class DuplicateRequest(RequestError):
    """The request ID is still live on this connection."""

    code = "duplicate_request"


class Overloaded(RequestError):
    """A bounded queue is full; try later."""

    code = "overloaded"


class CapacityError(RltError):
    """Something is full right now; the caller keeps what it has and tries later."""

    code = "capacity"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class NoPrefillWorker(RequestError):
    code = "no_prefill_worker"


class NoDecodeWorker(RequestError):
    code = "no_decode_worker"


class WorkerLost(RequestError):
    """A worker that held this request died."""

    code = "worker_lost"


class TransferFailed(RequestError):
    """The KV transfer of this request failed."""

    code = "transfer_failed"


class ReplayMismatch(RequestError):
    """A request was moved to other workers, and they computed another token than was delivered."""

    code = "replay_mismatch"


class ServiceLost(RequestError):
    """The coordinator was started again: what it was doing for this client is lost. Ask again."""

    code = "service_lost"


class SlowClient(RequestError):
    """The client did not take its output for so long that the service gave its requests up."""

    code = "slow_client"


class ShuttingDown(RequestError):
    """The service is stopping and takes no more requests."""

    code = "shutting_down"


class PassFailed(RequestError):
    """The device failed a pass that computed this request."""

    code = "pass_failed"


class ServiceUnreachable(RltError):
    """No coordinator answers at the given address."""

    code = "service_unreachable"


class ConfigError(ServiceError):
    """An option has a value that cannot work; the message names the option."""

    code = "bad_option"


class CheckpointError(ServiceError):
    """The checkpoint is damaged, incomplete or of an unsupported kind."""

    code = "bad_checkpoint"


class ProtocolError(RltError):
    """A peer or a caller did what the protocol does not allow."""

    code = "protocol"


class TransportError(RltError):
    """The wire between two workers does not work now, and may later."""

    code = "transport"


class InvariantBroken(RltError):
    """An owner's own books do not add up: a fault of rlt itself."""

    code = "invariant"


def error_from(code: str, message: str) -> RltError:
    """The exception that `code` names, as a client raises it; unknown codes become RltError."""
    kind = _BY_CODE.get(code, RltError)
    error = kind(message)
    error.code = code
    return error


def _subclasses(kind: type[RltError]) -> list[type[RltError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _subclasses(child))]


_BY_CODE = {kind.code: kind for kind in reversed(_subclasses(RltError))}


def error_codes() -> frozenset[str]:
    """Every code that an error of rlt can have."""
    return frozenset(_BY_CODE)
