"""The hosts of an elastic job: where a generation may start, and which hosts are left out for a while. Pure."""

from collections.abc import Collection


class Hosts:
    """Hosts, by name.

    Args:
        cooldown_s: How long a lost host is left out, the first time and at most; each loss doubles the time.
        own: Names of the supervisor's host, which is there as long as the job.
    """

    def __init__(self, cooldown_s: tuple[float, float], own: Collection[str] = ()):
        self._cooldown_s, self._own = cooldown_s, own
        self._cooled: dict[str, tuple[float, int]] = {}  # until when a host is left out, and how often it was
        self._gone: dict[str, tuple[float, str]] = {}  # whose keeper is gone: since when, and why
        self.slots: dict[str, int] = {}  # The number of ranks for each host that discovery has found.
        self.kept: set[str] = set()  # Those with a keeper.

    def usable(self, least: int, now: float) -> dict[str, int]:
        """The number of ranks for each host where they may start.

        A host that is left out is among them if the others have fewer than `least` slots, and it is known to be there:
        to wait would help nobody.
        """
        there = {host: slots for host, slots in self.slots.items() if slots > 0}
        found = {host: slots for host, slots in there.items() if self._cooled.get(host, (now, 0))[0] <= now}
        if sum(found.values()) >= least:
            return found
        return {host: slots for host, slots in there.items() if host in found or host in self.kept or host in self._own}

    def cool(self, host: str, now: float) -> None:
        """Leave a host out for a while."""
        first_s, longest_s = self._cooldown_s
        times = self._cooled.get(host, (0.0, 0))[1]
        self._cooled[host] = now + min(first_s * 2 ** times, longest_s), times + 1

    def keeper_found(self, host: str) -> None:
        self.kept.add(host)
        self._gone.pop(host, None)

    def keeper_gone(self, host: str, why: str, since: float) -> None:
        """The connection to the keeper of a host is closed."""
        self.kept.discard(host)
        self._gone[host] = min(since, self._gone.get(host, (since, ""))[0]), why

    def lost(self, patience_s: float, now: float) -> dict[str, str]:
        """Those whose keeper has been gone for `patience_s`, and why. They are not returned again."""
        found = {host: why for host, (since, why) in self._gone.items() if now - since >= patience_s}
        for host in found:
            del self._gone[host]
        return found

    def is_own(self, host: str) -> bool:
        """Whether it is the supervisor's host."""
        return host in self._own
