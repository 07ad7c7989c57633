"""Groups of gradients: which gradients are reduced by one collective. Horovod's arguments `groups` and `num_groups`."""

from collections.abc import Sequence

from ..core.errors import InvalidRequestError
from .identity import IdentitySet
from .types import Variable

Groups = int | list[list[Variable]] | None


class GradientGroups:
    """Divides lists of gradients into groups.

    Args:
        groups: A number of groups of about the same number of gradients, in their order; or lists of variables, whose
            gradients are a group each. The gradients of other variables are one more group. None: all are one group.
        num_groups: Deprecated form of a number; 0 means None.

    Raises:
        InvalidRequestError: `groups` is neither None, a positive number nor a list of lists of variables.
    """

    def __init__(self, groups: Groups = None, num_groups: int = 0):
        is_valid = (groups is None and num_groups >= 0) or (isinstance(groups, int) and groups > 0) or (
            isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups))
        if not is_valid:
            raise InvalidRequestError("groups should be a non-negative integer or a list of list of variables, and not "
                                      f"0. Received: groups={groups!r}, num_groups={num_groups!r}")
        self._count = groups if isinstance(groups, int) else num_groups
        self._sets = [] if groups is None or isinstance(groups, int) else [IdentitySet(group) for group in groups]

    def divide(self, variables: Sequence[Variable]) -> list[list[int]]:
        """The places of the variables in each group that has any, as lists. Local."""
        places = range(len(variables))
        if not self._sets and self._count <= 1:
            return [list(places)] if places else []
        if self._sets:
            numbers = [next((n for n, group in enumerate(self._sets) if variable in group), len(self._sets))
                       for variable in variables]
            divided = [[place for place in places if numbers[place] == number] for number in sorted(set(numbers))]
        else:
            count = min(self._count, len(variables))
            divided = [list(places[len(places) * k // count:len(places) * (k + 1) // count]) for k in range(count)]
        return [group for group in divided if group]
