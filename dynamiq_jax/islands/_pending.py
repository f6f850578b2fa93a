"""An exchange whose transfers run in a thread, beside local steps."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from dynamiq_jax.islands._state import IslandState, Transferred


class PendingExchange:
    """Exchange of a round that runs beside local steps; see `Islands.start_exchange`."""

    params: Any  # where the next local steps begin

    def __init__(
        self,
        params: Any,
        transfer: Callable[[], Transferred],
        finish: Callable[[Transferred], IslandState],
    ):
        self.params = params
        self._finish = finish
        self._state: IslandState | None = None
        self._transfer = concurrent.futures.Future[Transferred]()
        # A thread that does not keep a program from ending, as those of an executor do.
        threading.Thread(target=self._run, args=(transfer,), daemon=True).start()

    def done(self) -> bool:
        """Return whether the changes of the others are here, so that `result` does not wait."""
        return self._transfer.done()

    def result(self) -> IslandState:
        """Wait for the decision and the changes of the others, and take the outer steps since.

        All processes of an island call it at the same place of their programs.

        Returns:
          The state of a round later, or more if this island was late by more.

        Raises:
          RuntimeError: as `Islands.exchange`, and errors of the store.
        """
        if self._state is None:
            self._state = self._finish(self._transfer.result())
        return self._state

    def _run(self, transfer: Callable[[], Transferred]) -> None:
        try:
            self._transfer.set_result(transfer())
        except BaseException as error:  # raised by `result`
            self._transfer.set_exception(error)
