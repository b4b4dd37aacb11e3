"""A relay between the processes of a service, which treats messages as rules say. Tests only.

Workers and supervisors dial the relay, which dials the coordinator once for each of them under the
same identity. It rewrites what a decode worker says about where it listens, so that prefill workers
dial the relay too, unless that is a TCP address. Everything goes through unchanged and in order
unless a rule says otherwise.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import zmq

from .rules import Letter, Rule, Schedule, To, letter

SWAP_S = 0.3  # how long a message that is to be overtaken waits for one that overtakes it
HIGH_WATER = 100_000

Socket = zmq.Socket[bytes]


class _Front:
    """One ROUTER that others dial, and one DEALER towards the real listener per identity."""

    def __init__(
        self, number: int, context: zmq.Context[Socket], bind: str, target: str, inward: To
    ) -> None:
        self.number = number
        self.context = context
        self.target = target
        self.inward: To = inward
        self.outward: To = "worker" if inward == "coordinator" else "prefill"
        self.router = context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.set(zmq.ROUTER_HANDOVER, 1)
        self.router.set(zmq.SNDHWM, HIGH_WATER)
        self.router.bind(bind)
        self.dealers: dict[bytes, Socket] = {}

    def dealer(self, identity: bytes) -> Socket:
        if identity not in self.dealers:
            dealer = self.context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.IDENTITY, identity)
            dealer.set(zmq.SNDHWM, HIGH_WATER)
            dealer.connect(self.target)
            self.dealers[identity] = dealer
        return self.dealers[identity]

    def send(self, sent: Letter) -> None:
        """A message that nobody can take any more is lost, as on a wire."""
        _, to, identity = sent.route
        try:
            if to == self.inward:
                self.dealer(identity).send(sent.frame, zmq.NOBLOCK)
            else:
                self.router.send_multipart([identity, sent.frame], zmq.NOBLOCK)
        except zmq.Again:
            pass

    def close(self) -> None:
        for socket in (self.router, *self.dealers.values()):
            socket.close()


class Relay:
    """coordinator: the real endpoint. listen: where workers dial instead."""

    def __init__(
        self, coordinator: str, listen: str, folder: str, schedule: Schedule | None = None
    ) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._folder = folder
        self._fronts = [_Front(0, self._context, listen, coordinator, "coordinator")]
        self._rules: tuple[Rule, ...] = ()
        self._schedule = schedule
        self._waiting: dict[tuple[int, To, bytes], deque[tuple[float, Letter]]] = {}
        self._overtaken: dict[tuple[int, To, bytes], tuple[float, Letter]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # one waker at a time
        self._wake, self._woken = self._pair()
        self._stopping = False
        self.counts: Counter[str] = Counter()  # messages that came, by kind
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    # For the test's thread.

    def add(self, rule: Rule) -> Rule:
        """It is asked before all earlier ones."""
        self._do(lambda: self._set_rules((rule, *self._rules)))
        return rule

    def hold(self, kind: str, **where: object) -> Rule:
        return self.add(Rule("hold", kind, **where))  # type: ignore[arg-type]

    def release(self, rule: Rule) -> None:
        """The rule holds no more, and what it kept goes on, in order."""
        self._do(lambda: self._release(rule, send=True))

    def forget(self, rule: Rule) -> None:
        """The rule holds no more, and what it kept is lost."""
        self._do(lambda: self._release(rule, send=False))

    def use(self, schedule: Schedule | None) -> None:
        """From now on, for messages that no rule is for."""
        self._do(lambda: setattr(self, "_schedule", schedule))

    def close(self) -> None:
        self._stopping = True
        with self._lock:
            self._wake.send(b"")
        self._thread.join(10.0)
        self._wake.close()
        self._context.destroy(0)

    def _do(self, command: Callable[[], None]) -> None:
        """Run it on the relay's thread, and wait until it is done."""
        done = threading.Event()
        self._commands.append(lambda: (command(), done.set())[0])
        with self._lock:
            self._wake.send(b"")
        assert done.wait(10.0), "the relay hangs"

    # On the relay's thread.

    def _pair(self) -> tuple[Socket, Socket]:
        a, b = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        a.bind("inproc://wake")
        b.connect("inproc://wake")
        return a, b

    def _set_rules(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules

    def _release(self, rule: Rule, *, send: bool) -> None:
        self._rules = tuple(other for other in self._rules if other is not rule)
        while rule.kept:
            kept = rule.kept.popleft()
            if send:
                self._send(kept)

    def _run(self) -> None:
        while not self._stopping:
            ready = self._poll()
            if self._woken in ready:
                self._woken.recv()
                while self._commands:
                    self._commands.popleft()()
            for front in list(self._fronts):
                self._move(front, ready)
            self._send_due(time.monotonic())
        for front in self._fronts:
            front.close()
        self._woken.close()

    def _poll(self) -> dict[Socket, int]:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for front in self._fronts:
            for socket in (front.router, *front.dealers.values()):
                poller.register(socket, zmq.POLLIN)
        due = [queue[0][0] for queue in self._waiting.values()]
        due += [at_s for at_s, _ in self._overtaken.values()]
        timeout_ms = None if not due else max(0.0, 1000 * (min(due) - time.monotonic())) + 1
        return dict(poller.poll(timeout_ms))

    def _move(self, front: _Front, ready: dict[Socket, int]) -> None:
        if front.router in ready:
            identity, frame = front.router.recv_multipart()
            route = (front.number, front.inward, identity)
            self._take(letter(self._rewritten(frame), route))
        for identity, dealer in list(front.dealers.items()):
            if dealer in ready:
                self._take(letter(dealer.recv(), (front.number, front.outward, identity)))

    def _take(self, sent: Letter) -> None:
        self.counts[sent.kind] += 1
        rule = next((rule for rule in self._rules if rule.takes(sent)), None)
        if rule is None and self._schedule is not None:
            rule = self._schedule.rule(sent)
        now_s = time.monotonic()
        match rule.action if rule else None:
            case "drop":
                pass
            case "hold":
                assert rule is not None
                rule.kept.append(sent)
            case "swap" if sent.route not in self._overtaken:
                self._overtaken[sent.route] = (now_s + SWAP_S, sent)
            case "spoil":
                assert rule is not None and rule.bad is not None
                for frame in rule.bad(sent):
                    self._queue(replace(sent, frame=frame), now_s)
                self._queue(sent, now_s)
            case action:
                copies = rule.copies if rule and action == "copy" else 0
                delay_s = rule.delay_s if rule and action == "delay" else 0.0
                for _ in range(1 + copies):
                    self._queue(sent, now_s + delay_s)
                if late := self._overtaken.pop(sent.route, None):
                    self._queue(late[1], now_s)

    def _queue(self, sent: Letter, due_s: float) -> None:
        """Nobody overtakes anybody here."""
        queue = self._waiting.setdefault(sent.route, deque())
        queue.append((max(due_s, queue[-1][0]) if queue else due_s, sent))

    def _send_due(self, now_s: float) -> None:
        for route, (due_s, sent) in list(self._overtaken.items()):
            if due_s <= now_s:
                del self._overtaken[route]
                self._queue(sent, now_s)
        for route, queue in list(self._waiting.items()):
            while queue and queue[0][0] <= now_s:
                self._send(queue.popleft()[1])
            if not queue:
                del self._waiting[route]

    def _send(self, sent: Letter) -> None:
        self._fronts[sent.route[0]].send(sent)

    def _rewritten(self, frame: bytes) -> bytes:
        try:
            message = msgspec.msgpack.decode(frame)
            if message["type"] != "register" or not message["peer_endpoint"].startswith("ipc:"):
                return frame
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            return frame
        listen = f"ipc://{self._folder}/relay-{message['worker']}.sock"
        target = message["peer_endpoint"]
        if all(front.target != target for front in self._fronts):
            number = len(self._fronts)
            self._fronts.append(_Front(number, self._context, listen, target, "decode"))
        return msgspec.msgpack.encode({**message, "peer_endpoint": listen})


@contextmanager
def relay(
    coordinator: str, listen: str, folder: str, schedule: Schedule | None = None
) -> Iterator[Relay]:
    between = Relay(coordinator, listen, folder, schedule)
    try:
        yield between
    finally:
        between.close()
