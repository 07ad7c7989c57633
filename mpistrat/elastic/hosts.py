"""The hosts of an elastic job: where a generation may start, and which hosts are left out for a while. Pure."""

import math
from collections.abc import Collection, Iterable

ANSWER_S = 5.0  # How long an answer of a host holds.


class Hosts:
    """Hosts, by name.

    A host is *reached* if its keeper is connected, or if it is the supervisor's own. It is *there* if it is reached, or
    has just answered a probe. Ranks start on a host that is lost, or new in a job that runs, only if it is there.

    Args:
        cooldown_s: How long a lost host is left out, the first time and at most; each loss doubles the time.
        own: Names of the supervisor's host, which is there as long as the job.
    """

    def __init__(self, cooldown_s: tuple[float, float], own: Collection[str] = ()):
        self._cooldown_s, self._own = cooldown_s, own
        self._cooled: dict[str, tuple[float, int]] = {}  # until when a host is left out, and how often it was
        self._gone: dict[str, tuple[float, str]] = {}  # whose keeper is gone: since when, and why
        self._answered: dict[str, float] = {}  # when a host has answered last
        self._trusted: set[str] = set()  # where ranks may start unasked
        self._vain: set[str] = set()  # that have answered, and nothing has started there
        self._kept: set[str] = set()  # Those with a keeper.
        self.slots: dict[str, int] = {}  # The number of ranks for each host that discovery has found.

    def found(self, slots: dict[str, int], is_first: bool) -> None:
        """Discovery has found these hosts; `is_first`: no generation has started yet."""
        self.slots = {host: count for host, count in slots.items() if count > 0}
        if is_first:
            self.trust(self.slots)

    def answered(self, hosts: Collection[str], now: float) -> None:
        """These hosts have answered."""
        self._answered.update(dict.fromkeys(hosts, now))

    def is_reached(self, host: str) -> bool:
        return host in self._kept or host in self._own

    def is_there(self, host: str, now: float) -> bool:
        return self.is_reached(host) or now - self._answered.get(host, -math.inf) <= ANSWER_S

    def _is_rested(self, host: str, now: float) -> bool:
        return self._cooled.get(host, (now, 0))[0] <= now

    def usable(self, least: int, now: float) -> dict[str, int]:
        """The number of ranks for each host where they may start.

        If these have fewer than `least` slots, to wait would help nobody. So hosts that are left out are among them if
        they are there, and hosts that do not answer if their time is over: a firewall may drop the probes.
        """
        found = {host: slots for host, slots in self.slots.items()
                 if self._is_rested(host, now) and (host in self._trusted or self.is_there(host, now))}
        return found if sum(found.values()) >= least else {
            host: slots for host, slots in self.slots.items() if self._is_rested(host, now) or self.is_reached(host)
            or (self.is_there(host, now) and host not in self._vain)}

    def room(self, running: Collection[str], now: float) -> dict[str, int]:
        """The number of ranks for each host where there is room: on these hosts, and on those that are there."""
        return {host: slots for host, slots in self.slots.items()
                if host in running or (self._is_rested(host, now) and self.is_there(host, now))}

    def trust(self, hosts: Iterable[str]) -> None:
        """Let ranks start on these hosts without another answer."""
        self._trusted.update(hosts)

    def unreached(self, now: float, is_needed: bool) -> set[str]:
        """The hosts to ask, which are not reached. Those that are left out are asked if they `is_needed`."""
        return {host for host in self.slots if (is_needed or self._is_rested(host, now)) and not self.is_reached(host)}

    def cool(self, host: str, now: float) -> float:
        """Leave a host out for a while. Returns for how many seconds."""
        (self._vain.add if self.is_there(host, now) else self._vain.discard)(host)
        first_s, longest_s = self._cooldown_s
        times = self._cooled.get(host, (0.0, 0))[1]
        seconds = min(first_s * 2 ** times, longest_s)
        self._cooled[host] = now + seconds, times + 1
        self._trusted.discard(host)
        return seconds

    def keeper_found(self, host: str) -> None:
        self._kept.add(host)
        self._trusted.add(host)
        self._gone.pop(host, None)

    def keeper_gone(self, host: str, why: str, since: float) -> None:
        """The connection to the keeper of a host is closed."""
        self._kept.discard(host)
        self._gone[host] = min(since, self._gone.get(host, (since, ""))[0]), why

    def lost(self, patience_s: float, now: float) -> dict[str, str]:
        """Those whose keeper has been gone for `patience_s`, and why. They are not returned again."""
        found = {host: why for host, (since, why) in self._gone.items() if now - since >= patience_s}
        for host in found:
            del self._gone[host]
        return found
