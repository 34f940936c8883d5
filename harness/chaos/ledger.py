"""What became of every contribution, as the tape tells it, and the verdict on it.

Pure: whoever reads tape and receipts tells the ledger.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fragments.errors import DilocoError
from fragments.records import ContributionKey, Version

MERGED = "merged"
WAITING = "waiting to be merged"
LEFT_OVER = "left over when the run was finished"
VOID = "void in a new epoch"
ROLLED_BACK = "void: an operator went back to a snapshot"
DROPPED = "void: dropped with its learner's eviction"
UNEXPLAINED = "gone without a reason"
_LOST = (VOID, UNEXPLAINED)
_VOIDED = (ROLLED_BACK, DROPPED)
"""Somebody has asked for it."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Tells one payload from another."""

    crc32c: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """One line of a learner's receipts."""

    key: ContributionKey
    payload: Bytes
    pid: int
    unix_s: float


def read_receipts(paths: Iterable[Path]) -> list[Acknowledged]:
    """All receipts in these files; a file that is not there has none.

    Raises:
        DilocoError: for a line that is no receipt.
    """
    found = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                found.append(_acknowledged(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DilocoError(f"line {number} of {path} is no receipt: {error}") from error
    return found


def _acknowledged(line: dict[str, object]) -> Acknowledged:
    numbers = {name: int(str(line[name])) for name in ("fragment", "epoch", "version")}
    version = Version(numbers["epoch"], numbers["version"])
    return Acknowledged(
        ContributionKey(str(line["learner"]), numbers["fragment"], version),
        Bytes(int(str(line["crc32c"])), int(str(line["num_bytes"]))),
        int(str(line["pid"])),
        float(str(line["unix_s"])),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lost` and `twice` are numbers of contributions, `findings` a sentence for each of them.
    `voided`: acknowledged, and undone because an operator asked for it. `fates`: how many of those
    on the tape came to which end.
    """

    acknowledged: int
    lost: int
    twice: int
    voided: int
    fates: dict[str, int]
    findings: tuple[str, ...]


@dataclass(slots=True)
class Ledger:
    """Told of each event of the tape, in order."""

    _accepted: dict[ContributionKey, list[Bytes]] = field(default_factory=lambda: defaultdict(list))
    _times: Counter[ContributionKey] = field(default_factory=Counter)
    """Accepted, since it was void last."""
    _merges: dict[ContributionKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The versions that it came into, of those that still stand."""
    _fate: dict[ContributionKey, str] = field(default_factory=dict)

    def accept(self, key: ContributionKey, payload: Bytes) -> None:
        """The server took it, and said so or was about to."""
        self._accepted[key].append(payload)
        self._times[key] += 1
        self._fate[key] = WAITING

    def merge(self, keys: Iterable[ContributionKey], version: int, refused: str | None) -> None:
        """A round took these into `version`; `refused`: why nothing came of it."""
        for key in keys:
            if refused is None:
                self._merges[key].append(version)
            self._fate[key] = MERGED if refused is None else f"not merged: {refused}"

    def drop(self, key: ContributionKey, reason: str) -> None:
        """It waits no more, and no round took it."""
        self._fate[key] = reason

    def void(self, key: ContributionKey, reason: str) -> None:
        """It is as if it had never come, because an operator asked for that: it may come again."""
        self._fate[key] = reason
        self._times[key] = 0
        self._merges[key] = []

    def roll_back(self, versions: Sequence[int]) -> None:
        """An operator went back to these versions, one for each fragment: what came later is void,
        and so is what waits.
        """
        for key, fate in list(self._fate.items()):
            later = any(each > versions[key.fragment] for each in self._merges[key])
            if later or fate == WAITING:
                self.void(key, ROLLED_BACK)

    def judge(self, receipts: Iterable[Acknowledged]) -> Verdict:
        """Whether all that was acknowledged counts, and counts once."""
        acknowledged: dict[ContributionKey, set[Bytes]] = defaultdict(set)
        for receipt in receipts:
            acknowledged[receipt.key].add(receipt.payload)
        lost = {key: why for key, sent in acknowledged.items() if (why := self._lost(key, sent))}
        twice = {
            key: f"accepted {self._times[key]} times, merged {len(self._merges[key])} times"
            for key in sorted(self._fate, key=str)
            if self._times[key] > 1 or len(self._merges[key]) > 1
        }
        findings = [f"{key}: {why}" for key, why in (*lost.items(), *twice.items())]
        fates = dict(sorted(Counter(self._fate.values()).items()))
        voided = sum(self._fate.get(key) in _VOIDED for key in acknowledged)
        return Verdict(len(acknowledged), len(lost), len(twice), voided, fates, tuple(findings))

    def _lost(self, key: ContributionKey, sent: set[Bytes]) -> str:
        """Why one that was acknowledged does not count; "" where it does."""
        if key not in self._accepted:
            return "acknowledged, but not on the tape"
        if sent != set(self._accepted[key]):
            return "other bytes are on the tape than were acknowledged"
        fate = self._fate[key]
        return f"acknowledged, and {fate}" if fate in _LOST else ""
