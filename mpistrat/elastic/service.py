"""The threads of the supervisor: they talk to the agents, look for hosts, and carry out what supervisor_plan decides.

The main thread of `mpistrat run --elastic` runs one mpirun after the other, as these threads order (`next_order`). The
agents of all hosts connect to one TCP port of this host. (Connections through ssh would need a second authentication,
and batch systems close the port of ssh as often as other ports.)
"""

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, cast

from ..process import procfs
from ..process.connection import Connection, Listening, Message
from .agent import BEAT_S, HOST_LOST_AFTER_S, SILENT_S, STAY_S
from .commits import CommitId
from .elastic_job import ElasticJob
from .supervisor_plan import Action, Done, Leave, Limits, Plan, Say, Start, Stop

logger = logging.getLogger(__name__)
_DISCOVERY_S = 1.0  # between two searches for hosts
_END_S = 3.0  # for the agents to end
# The ports at which a running host accepts or refuses a connection: a port where nothing listens, and the port of ssh,
# since firewalls may drop packets to other ports.
_PORTS, _ANSWERS, _ANSWER_LIMIT_S = (9, 22), (0, errno.ECONNREFUSED), 1.0


class Service:
    """The supervisor's threads: they talk to the agents, look for hosts, and carry out what the Plan decides.

    Args:
        hosts: The hosts when the job starts, each with its number of ranks.
        find_hosts: Returns the hosts that exist now, in the form of `hosts`; None if it cannot find out.
        addresses: Names and addresses at which agents can reach this host.
        say: Prints a sentence.
        stop: Ends a generation's mpirun. Arguments: generation, reason, and whether all ranks have ended with code 0.
        reached: Returns those of the given hosts that answer. Called for names without an address, such as ssh aliases.
        checkpoint, checkpoint_every: See ElasticJob.
    """

    def __init__(self, limits: Limits, hosts: Mapping[str, int], find_hosts: Callable[[], Mapping[str, int] | None],
                 addresses: Iterable[str], say: Callable[[str], None], stop: Callable[[int, str, bool], None],
                 reached: Callable[[Sequence[str]], set[str]], checkpoint: str = "", checkpoint_every: int = 0):
        own = socket.gethostname()
        self._plan = Plan(limits, time.monotonic(), saves=bool(checkpoint),
                          own={own, own.partition(".")[0], "localhost", "127.0.0.1"})
        self._plan.hosts_found(dict(hosts), time.monotonic())
        self._find_hosts, self._say, self._stop, self._reached = find_hosts, say, stop, reached
        self._stay_s = max(STAY_S, limits.timeout_s + HOST_LOST_AFTER_S)
        self._checkpoint = checkpoint, checkpoint_every
        self._addresses = tuple(addresses)
        self._name, self._secret = secrets.token_hex(8), secrets.token_hex(32)
        self._orders: SimpleQueue[Start | Done] = SimpleQueue()
        self._events: SimpleQueue[tuple[Connection | None, Message | None]] = SimpleQueue()
        self._agents: dict[Connection, str] = {}
        self._heard: dict[Connection, float] = {}
        self._names: dict[Connection, str] = {}  # the hostnames of the agents' hosts
        # The processes that mpirun has started, and that no agent has reported yet: their pids by hostname and rank.
        self._awaited: dict[str, dict[int, int]] = {}
        self._hosts: dict[str, set[str]] = {}  # the listed hosts, with their addresses
        self._asked: set[str] = set()  # the hosts that the Plan wants to be probed
        is_here = all(address in ("localhost", "127.0.0.1") for address in self._addresses)
        listener = socket.create_server(("127.0.0.1" if is_here else "", 0), backlog=1024)
        self._port = listener.getsockname()[1]
        self._listening = Listening(listener, bytes.fromhex(self._secret),
                                    lambda connection: connection.read(lambda *event: self._events.put(event)))
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat-elastic", daemon=True)
        self._thread.start()
        threading.Thread(target=self._look_for_hosts, name="mpistrat-hosts", daemon=True).start()

    # -- for the main thread -------------------------------------------------------------------------------------------

    def next_order(self, timeout_s: float) -> Start | Done | None:
        """Wait for the next order: Start a generation, or Done. Return None if there is no order within `timeout_s`."""
        with contextlib.suppress(Empty):
            return self._orders.get(timeout=timeout_s)
        return None

    def job(self, generation: int) -> ElasticJob:
        newest = self._plan.newest
        return ElasticJob(self._name, self._secret, generation, self._addresses, self._port, *self._checkpoint,
                          newest=(newest.generation, newest.number), stay_s=self._stay_s)

    def started(self, generation: int, processes: Mapping[int, tuple[str, int]], ended: Iterable[int]) -> None:
        """Note which ranks have started, as they report in the output of mpirun.

        `processes`: Hostname and pid of each rank that has started. `ended`: The ranks that have ended without init().
        """
        self._put(kind="started", generation=generation, processes=dict(processes), ended=list(ended))

    def generation_over(self, generation: int, code: int, has_started: bool) -> None:
        """Note that the mpirun of the generation has ended. The arguments are those of Plan.generation_over."""
        self._put(kind="over", generation=generation, code=code, has_started=has_started)

    def signalled(self, name: str, code: int, is_urgent: bool) -> None:
        self._put(kind="signal", name=name, code=code, is_urgent=is_urgent)

    def close(self) -> None:
        """End the agents, and wait until they have ended."""
        self._is_closed.set()
        self._put(kind="close")
        self._thread.join(_END_S + 1.0)

    def _put(self, **message: Any) -> None:
        self._events.put((None, message))

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _look_for_hosts(self) -> None:
        """Search for hosts, and probe the hosts that the Plan names. Has its own thread, because both may be slow."""
        known: dict[str, set[str]] = {}
        while True:
            found, asked = self._find_hosts(), self._asked
            if found is not None:
                # A host that is probed may have a new address.
                known = {host: (host not in asked and known.get(host)) or _addresses_of(host.rpartition("@")[2])
                         for host in found}
                self._put(kind="hosts", slots=dict(found), addresses=known)
                asked = asked & known.keys()
                answering = _answering({address for host in asked for address in known[host]})
                reached = self._reached([host for host in asked if not known[host]])
                self._put(kind="answers", hosts=[host for host in asked if known[host] & answering or host in reached])
            if self._is_closed.wait(_DISCOVERY_S):
                return

    def _run(self) -> None:
        beat_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now > beat_at + SILENT_S:
                # This process was stopped, and did not read. Messages of agents, on ends of ranks too, may be waiting.
                self._heard = dict.fromkeys(self._heard, now)
            if now >= beat_at:
                beat_at = now + BEAT_S
                for connection in list(self._agents):
                    if now - self._heard[connection] > HOST_LOST_AFTER_S:
                        self._do(self._without(connection, self._plan.host_lost,
                                               f"no sign of life for {now - self._heard[connection]:.1f} s", now))
                for rank, pid in self._awaited.get(socket.gethostname(), {}).items():
                    if procfs.find(pid) is None:
                        self._plan.missing(self._plan.generation, rank, now)
                self._do(self._plan.tick(now))
                self._asked = self._plan.asked(now)
            try:
                source, message = self._events.get(timeout=max(beat_at - time.monotonic(), 0.0))
            except Empty:
                continue
            if source is None and message is not None and message["kind"] == "close":
                self._end_agents()
                return
            try:
                self._do(self._decide(source, message, time.monotonic()))
            except (KeyError, TypeError) as error:  # An agent of another version.
                logger.warning("a message of an agent is not understood: %r (%s)", message, error)

    def _decide(self, connection: Connection | None, message: Message | None, now: float) -> list[Action]:
        plan = self._plan
        if connection is None:
            assert message is not None
            if message["kind"] == "hosts":
                self._hosts = message["addresses"]
                return plan.hosts_found(message["slots"], now)
            if message["kind"] == "answers":
                return plan.answered(message["hosts"], now)
            if message["kind"] == "over":
                self._awaited = {}
                silent = [host for connection, host in self._agents.items() if now - self._heard[connection] > SILENT_S]
                return plan.generation_over(message["generation"], message["code"], now, message["has_started"], silent)
            if message["kind"] == "started":
                if message["generation"] == plan.generation:  # Watch the ranks' processes until they have said hello.
                    self._awaited = {}
                    for rank, (host, pid) in message["processes"].items():
                        if rank not in plan.heard:
                            self._awaited.setdefault(host, {})[rank] = pid
                for rank in message["ended"]:
                    plan.missing(message["generation"], rank, now)
                return []
            return plan.signalled(message["name"], message["code"], message["is_urgent"], now)
        if message is None:
            return self._without(connection, plan.agent_gone,
                                 "its agent has ended, or the connection to it is broken", now)
        self._heard[connection] = now
        kind = message["kind"]
        if kind == "agent":
            self._agents[connection] = self._listed(message["host"], connection.peer[0])
            self._names[connection] = message["host"]
            logger.info("an agent runs on %s (process %d)", message["host"], message["pid"])
            if plan.leaving is not None:
                connection.send(kind="leave", generation=plan.leaving.generation, why=plan.leaving.why)
            plan.agent_found(self._agents[connection])
            return []
        if (host := self._agents.get(connection)) is None:
            return []
        if kind == "beat":
            connection.send(kind="beat", generation=plan.generation, sent=message["sent"],
                            awaited=list(self._awaited.get(self._names[connection], {}).items()))
            return []
        if kind == "cut off":
            return [Say(f"the ranks on {host} were ended: {message['why']}. The commits there are kept")]
        if kind == "committed":
            plan.committed(CommitId(*message["commit"]), message["step"])
            return []
        if kind == "missing":
            plan.missing(message["generation"], message["rank"], now)
            return []
        if kind == "preempted":
            return plan.preempted(host, message["generation"], message["why"], now)
        pid, generation = message["pid"], message["generation"]
        if kind == "hello":
            if generation == plan.generation:
                for processes in self._awaited.values():
                    processes.pop(message["rank"], None)
            plan.hello(host, message["rank"], pid, generation, message["connected"])
            return []
        if kind == "renamed":
            return plan.renamed(host, pid, generation, message["rank"], message["size"], now)
        if kind == "died":
            return plan.died(host, pid, generation, now)
        return plan.ended(host, pid, generation, message["code"], message["why"], now)

    def _without(self, connection: Connection, lost: Callable[[str, str, float], list[Action]], why: str, now: float
                 ) -> list[Action]:
        """Forget the broken connection of an agent. Call `lost` if there is no other connection to the agent's host."""
        host = self._agents.pop(connection, None)
        self._names.pop(connection, None)
        connection.close()
        return [] if host is None or host in self._agents.values() else lost(host, why, now)

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._say(action.text)
            elif isinstance(action, Leave):
                for connection in self._agents:
                    connection.send(kind="leave", generation=action.generation, why=action.why)
            elif isinstance(action, Stop):
                self._stop(action.generation, action.why, action.is_done)
            else:
                self._orders.put(action)

    def _end_agents(self) -> None:
        self._listening.close()
        for connection in self._agents:
            connection.send(kind="end", why="the job is over")
        until, left = time.monotonic() + _END_S, set(self._agents)
        while left and time.monotonic() < until:
            try:
                source, message = self._events.get(timeout=0.1)
            except Empty:
                continue
            if message is None and source is not None:
                left.discard(source)

    def _listed(self, host: str, peer: str) -> str:
        """Return the name that the list of hosts uses for the host of an agent. `peer`: The address of the agent."""
        names, short = list(self._hosts), host.partition(".")[0]
        for name, addresses in self._hosts.items():
            if name.rpartition("@")[2].partition(".")[0] == short or peer in addresses:
                return name
        is_here = peer.startswith("127.") or host == socket.gethostname()
        return names[0] if len(names) == 1 or (is_here and "localhost" in names) else host


def _addresses_of(name: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is empty or too long.
        return set()


def _answering(addresses: Iterable[str]) -> set[str]:
    """Return the addresses at which a host accepts or refuses a TCP connection within `_ANSWER_LIMIT_S` seconds."""
    found: set[str] = set()
    with contextlib.ExitStack() as open_ones, selectors.DefaultSelector() as waiting:
        for address in addresses:
            for port in _PORTS:
                try:
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    asking = open_ones.enter_context(socket.socket(family))
                except OSError:  # This kernel has no IPv6, or too many files are open.
                    continue
                asking.setblocking(False)
                if (code := asking.connect_ex((address, port))) == errno.EINPROGRESS:
                    waiting.register(asking, selectors.EVENT_WRITE, address)
                elif code in _ANSWERS:
                    found.add(address)
        until = time.monotonic() + _ANSWER_LIMIT_S
        while waiting.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                waiting.unregister(key.fileobj)
                if cast("socket.socket", key.fileobj).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    found.add(key.data)
    return found


def addresses_towards(hosts: Iterable[str]) -> list[str]:
    """Return names and addresses at which `hosts` can reach this host; ["127.0.0.1"] if `hosts` has only this host."""
    found: list[str] = []
    for address in (address for host in hosts for address in _addresses_of(host.rpartition("@")[2])):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            found.append(probe.getsockname()[0])
    others = list(dict.fromkeys(each for each in found if not each.startswith("127.") and each != "::1"))
    return [*others, os.uname().nodename, "127.0.0.1"] if others else ["127.0.0.1"]
