"""What every bulk call is checked for before anything else."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from fragments.errors import RefusedError, SettingsError
from fragments.records import RefusalCode
from services.outer.port import OuterPort
from services.settings import BULK_DEADLINE_LIMIT_S


class RunIdentity(NamedTuple):
    """What a caller must name to be sure that it means this run. Constant while a server runs."""

    run_id: str
    layout_digest: str

    @classmethod
    def of(cls, outer: OuterPort) -> RunIdentity:
        """That of the run that `outer` serves."""
        run = outer.describe()
        return cls(run.run_id, run.layout_digest)

    def check(self, run_id: str, layout_digest: str) -> None:
        """Raises RefusedError (MISMATCH) for another run or another layout."""
        if run_id != self.run_id:
            raise RefusedError(
                RefusalCode.MISMATCH,
                f"this server trains run {self.run_id!r}, not {run_id!r}: check the address",
            )
        if layout_digest != self.layout_digest:
            raise RefusedError(
                RefusalCode.MISMATCH,
                f"the layout differs (digest {layout_digest or 'missing'}, here "
                f"{self.layout_digest}): the learner's model or settings are not this run's",
            )


def check_deadline(context: grpc.ServicerContext) -> None:
    """Raises SettingsError for a bulk call without a deadline, or with too long a one.

    A transfer holds a thread; with a deadline no peer can hold it for ever.
    """
    if context.time_remaining() > BULK_DEADLINE_LIMIT_S:  # without a deadline: years
        raise SettingsError(
            f"a bulk call needs a deadline of at most {BULK_DEADLINE_LIMIT_S:.0f} s"
        )
