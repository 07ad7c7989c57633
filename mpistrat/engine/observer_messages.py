"""Carries the messages of the ranks' observers over the control plane, between those of the negotiation."""

from ..core.interfaces import ControlPlane, Observer
from ..negotiation.coordinator import Coordinator
from ..negotiation.messages import OBSERVER


class ObserverMessages:
    """One rank's part: it sends those of its own observer, and passes on those of others. In the thread that drives."""

    def __init__(self, control: ControlPlane, coordinator: Coordinator, observer: Observer):
        self._control, self._observer = control, observer
        self._parent, self._children = coordinator.parent, coordinator.children

    def send(self) -> None:
        """Send one message of this rank's observer, which has some, if there is room for it beside the others."""
        receivers = self._children if self._parent is None else (self._parent,)
        if not self._control.is_sending_to(receivers):
            message = OBSERVER + self._observer.outgoing.popleft()
            for receiver in receivers:
                self._control.send(receiver, message)

    def take(self, source: int, message: bytes) -> None:
        """Take a message that begins with OBSERVER: one of rank 0 is for all ranks, one of another rank for rank 0."""
        parent = self._parent
        if parent in (None, source):
            self._observer.receive(message[len(OBSERVER):])
        for receiver in self._children if source == parent else () if parent is None else (parent,):
            self._control.send(receiver, message)
