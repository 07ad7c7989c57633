"""What ends the engines of all ranks because of a graph of one rank.

The collectives that the graph has submitted cannot be taken back: the other ranks may wait for them, and would execute
them with what this rank submits for the next step.
"""

from ..core.errors import EngineError


class BrokenOffError(EngineError):
    """Ends the engine. The ranks raise it as EngineError, with the same text.

    Args:
        cause: What has happened on which rank, as a sentence.
    """

    def __init__(self, cause: str):
        super().__init__(f"{cause} The other collectives of the step cannot be taken back, so the engine has ended on "
                         "all ranks. To go on in the same process, call shutdown() and init() on every rank.")
