"""What the values of a run's fragments hold, also where the run goes back, and forward again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class _Value(Generic[Part]):
    """What a merge put into a fragment, and what was there before; None where nothing is known."""

    parts: tuple[Part, ...]
    before: _Value[Part] | None


class Lineage(Generic[Part]):
    """By fragment: the parts that its present value holds.

    A value is known by version and digest: in two epochs the same number may stand for two values.
    One that was never told of holds nothing that is known. `undone`: parts that no value holds any
    more, with the epoch that began without them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, str], _Value[Part] | None] = {}
        self._values: dict[int, _Value[Part] | None] = {}
        self._versions: dict[int, int] = {}
        self.undone: dict[Part, int] = {}

    def add(self, fragment: int, version: int, digest: str, parts: Sequence[Part]) -> None:
        """A merge has taken a fragment to `version`; of no parts, it left the value as it was."""
        value = self._values.get(fragment)
        value = _Value(tuple(parts), value) if parts else value
        self._set(fragment, version, digest, value)

    def rename(self, digests: Sequence[str]) -> None:
        """What the fragments are has other digests from now on, and no other parts."""
        for fragment, digest in enumerate(digests):
            version, value = self._versions.get(fragment, 0), self._values.get(fragment)
            self._set(fragment, version, digest, value)

    def go(self, fragments: Sequence[tuple[int, str]], epoch: int) -> None:
        """Begin `epoch` with values that were there before: version and digest of each fragment."""
        for fragment, (version, digest) in enumerate(fragments):
            before = list(self._parts(fragment))
            self._set(fragment, version, digest, self._known.get((fragment, version, digest)))
            held = set(self._parts(fragment))
            self.undone |= {part: epoch for part in before if part not in held}
            for part in held:
                self.undone.pop(part, None)

    def held(self) -> list[Part]:
        """All parts, in no order."""
        return [part for fragment in self._values for part in self._parts(fragment)]

    def _set(self, fragment: int, version: int, digest: str, value: _Value[Part] | None) -> None:
        self._versions[fragment], self._values[fragment] = version, value
        self._known[fragment, version, digest] = value

    def _parts(self, fragment: int) -> Iterator[Part]:
        value = self._values.get(fragment)
        while value is not None:
            yield from value.parts
            value = value.before
