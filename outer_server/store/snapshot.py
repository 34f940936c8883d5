"""Snapshots: one directory each, written beside and renamed into place.

snapshots/000042/
manifest.json            format, digests, checksums of all files and of itself
state.json               the scheduler's state
weights.safetensors      the broadcast copy, by tensor path: what a user wants
server.safetensors       master/<path> and outer/<leaf>/<path>
contributions/N.bin      accepted payloads that no round has merged yet

Written and read fragment by fragment, so neither takes more memory than a fragment. Checksums say
whether the disk kept what was written; they protect from nobody who means harm. Each file has those
of its pieces, [bytes, CRC-32C], taken while they are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from safetensors import SafetensorError

from fragments.digest import digest_hex
from fragments.disk import Disk, write_atomically
from fragments.errors import PayloadError, RunDirectoryError
from fragments.layout import Layout
from fragments.payload import Payload
from fragments.records import ContributionKey
from fragments.runspec import RunSpec
from fragments.sealed import seal, unseal
from fragments.tensors import Checksum, check, write_summed
from outer_server.core.state import Rollback, RunState
from outer_server.core.step import FragmentParameters
from outer_server.store.unwritten import Unwritten
from outer_server.store.values import read_values, write_values

FORMAT = 3
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
    PayloadError,
)
"""What reading a damaged snapshot may raise."""

KEPT = 3
"""Snapshots kept; older ones are removed once a newer one is in place."""

_log = structlog.get_logger(__name__)
_STATE: TypeAdapter[RunState] = TypeAdapter(RunState)
"""Numbers that are not finite (an unknown loss) are written as Python's json writes them: NaN."""

_KEYS: TypeAdapter[list[ContributionKey]] = TypeAdapter(list[ContributionKey])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a server needs to go on, to be written. `fragments` are those of `state`'s
    versions; what is written, of them and of `payloads`, is let go of. `position`: the number of
    the last event of the tape that is in it; None where no tape is kept.
    """

    state: RunState
    fragments: Unwritten
    payloads: dict[ContributionKey, Payload]
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What was read of a snapshot. `is_newest`: of the newest that was written."""

    name: str
    state: RunState
    fragments: tuple[FragmentParameters, ...]
    payloads: Mapping[ContributionKey, Payload]
    position: int | None
    is_newest: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot that was written. `covered`: up to which event all that are kept reach; None where
    one does not say.
    """

    name: str
    covered: int | None


def save(
    disk: Disk,
    directory: Path,
    layout: Layout,
    snapshot: Snapshot,
    rollbacks: Sequence[Rollback] = (),
    kept: int = KEPT,
) -> Path:
    """Write `snapshot` under the next number; return its directory.

    Old ones beyond `kept` are removed only when it is in place and its state can be read back, and
    not while the tape after one that is kept goes back to them: by the rollbacks of its state or
    `rollbacks`.
    Raises RunDirectoryError, and leaves the old ones, when it cannot be written, or could not be
    read again.
    """
    number = max([int(path.name) for path in numbered(directory)], default=-1) + 1
    target = directory / f"{number:06d}"
    draft = directory / f".{number:06d}.new"
    disk.remove(draft)
    try:
        disk.make_directory(draft / "contributions")
        _write(disk, draft, layout, snapshot)
        disk.rename(draft, target)
        disk.sync_directory(directory)
    except OSError as error:
        disk.remove(draft)
        raise RunDirectoryError(
            f"no snapshot can be written to {directory}: {error}; see to its disk (room, rights)"
        ) from error
    except ValueError as error:
        disk.remove(draft)
        raise RunDirectoryError(f"what is held is no snapshot to go on from: {error}") from error
    for old in _unneeded(directory, (*rollbacks, *snapshot.state.rollbacks), kept):
        disk.remove(old)
    return target


def load(path: Path, spec: RunSpec, layout: Layout) -> Restored:
    """This snapshot. Raises RunDirectoryError where it is missing or damaged."""
    try:
        return _read(path, spec, layout, is_newest=[path] == numbered(path.parent)[-1:])
    except DAMAGE as error:
        raise RunDirectoryError(f"snapshot {path.name} is damaged or missing: {error}") from error


def load_newest(directory: Path, spec: RunSpec, layout: Layout) -> Restored:
    """The newest snapshot that is whole.

    Damaged ones are passed over, with a warning. Raises RunDirectoryError when
    there is none.
    """
    reasons: list[str] = []
    for path in reversed(numbered(directory)):
        try:
            return _read(path, spec, layout, is_newest=not reasons)
        except DAMAGE as error:
            reasons.append(f"{path.name}: {error}")
            _log.warning("snapshot_damaged", snapshot=path.name, reason=str(error))
    raise RunDirectoryError(
        f"{directory} has no usable snapshot ({'; '.join(reasons) or 'there is none'}): put one, or"
        " the whole run directory, back from a backup or a copy; without any this run cannot go on,"
        " and `diloco init` begins another"
    )


def load_whole(directory: Path, spec: RunSpec, layout: Layout, least: int) -> Restored | None:
    """The oldest snapshot that is whole and was taken at event `least` of the tape or later; None
    without.
    """
    for path in numbered(directory):
        with suppress(*DAMAGE):
            position = _manifest(path).get("position")
            if position is not None and position >= least:
                return _read(path, spec, layout, is_newest=False)
    return None


@dataclass(frozen=True, slots=True)
class Known:
    """A snapshot without its values: its name, where on the tape it was taken, its state."""

    name: str
    position: int | None
    state: RunState


def known(directory: Path, spec: RunSpec) -> list[Known]:
    """What is known of the snapshots whose state can be read, oldest first."""
    found = []
    for path in numbered(directory):
        with suppress(*DAMAGE):
            manifest = _manifest(path)
            check(path / "state.json", _pairs(manifest["crc32c"]["state.json"]))
            state = _state_from_json((path / "state.json").read_text(), spec)
            found.append(Known(path.name, manifest.get("position"), state))
    return found


def damaged(directory: Path, spec: RunSpec, layout: Layout) -> list[str]:
    """What is wrong with which snapshots, a sentence for each that no run could go on from."""
    found = []
    for path in numbered(directory):
        try:
            _read(path, spec, layout, is_newest=False)
        except DAMAGE as error:
            found.append(f"snapshot {path.name} is damaged: {error}")
    return found


def is_same(one: RunState, other: RunState) -> bool:
    """Whether two states are equal; what is no number equals itself. What other releases word
    otherwise or did not note is left out: the reason of a phase, what learners passed over, digests
    of versions that are past.
    """
    return _state_json(_without_notes(one)) == _state_json(_without_notes(other))


def _without_notes(state: RunState) -> RunState:
    learners = {name: replace(each, passed_over=()) for name, each in state.learners.items()}
    fragments = tuple(replace(each, past=()) for each in state.fragments)
    return replace(state, learners=learners, fragments=fragments, phase_reason="")


def oldest_position(directory: Path) -> int | None:
    """Up to which event all snapshots that are kept reach; None where one does not say."""
    positions: list[int] = []
    for path in numbered(directory):
        try:
            position = _manifest(path).get("position")
        except DAMAGE:
            return None
        if not isinstance(position, int):
            return None
        positions.append(position)
    return min(positions, default=None)


def numbered(directory: Path) -> list[Path]:
    """Finished snapshots, oldest first."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if path.name.isdigit())
    return sorted(found, key=lambda path: int(path.name))


def _unneeded(directory: Path, rollbacks: Sequence[Rollback], kept: int) -> list[Path]:
    """Old ones that nothing goes back to: the tape after a snapshot of an older epoch than a
    rollback began has that rollback, and needs its snapshot. Damaged ones stand for no other.
    """
    paths = numbered(directory)
    whole = [path for path in paths if _is_readable(path)][-kept:]
    oldest = min(map(_epoch, whole), default=0)
    needed = {rollback.snapshot for rollback in rollbacks if rollback.epoch > oldest}
    return [path for path in paths[: paths.index(whole[0])] if path.name not in needed]


def _is_readable(path: Path) -> bool:
    """Whether a snapshot's manifest and state are whole; its values take longer to read."""
    try:
        check(path / "state.json", _pairs(_manifest(path)["crc32c"]["state.json"]))
    except DAMAGE:
        return False
    return True


def _epoch(path: Path) -> int:
    """Of a snapshot; 0, which is older than all, where it cannot be read."""
    try:
        return int(json.loads((path / "state.json").read_bytes())["epoch"])
    except DAMAGE:
        return 0


def _write(disk: Disk, draft: Path, layout: Layout, snapshot: Snapshot) -> None:
    keys = sorted(snapshot.payloads, key=lambda k: (k.fragment, k.learner, k.base_version))
    payloads = [snapshot.payloads[key] for key in keys]
    contributions = [
        {"key": key, "codec": p.codec, "raw_size": p.raw_size, "crc32c": p.crc32c}
        for key, p in zip(json.loads(_KEYS.dump_json(keys)), payloads, strict=True)
    ]
    sums: dict[str, tuple[Checksum, ...]] = {}
    for number, payload in enumerate(payloads):
        name = f"contributions/{number}.bin"
        sums[name] = write_summed(disk, draft / name, payload.data)
    snapshot.payloads.clear()
    del payloads
    sums["state.json"] = write_summed(
        disk, draft / "state.json", _state_json(snapshot.state).encode()
    )
    digests = [fragment.digest for fragment in snapshot.state.fragments]
    sums |= write_values(disk, draft, snapshot.state.spec, layout, snapshot.fragments, digests)
    manifest = {
        "format": FORMAT,
        "position": snapshot.position,
        "fragments": [{"version": f.version, "digest": f.digest} for f in snapshot.state.fragments],
        "contributions": contributions,
        "crc32c": sums,
    }
    write_atomically(disk, draft / "manifest.json", seal(manifest))
    disk.sync_directory(draft / "contributions")


def _state_json(state: RunState) -> str:
    """The state, with the settings as they are by now (those of the birth stand in run.json).

    It is read back at once: ValueError now, rather than a snapshot that cannot
    be read when it is needed.
    """
    # Sets in order, or the same state would be other text in another process.
    text = json.dumps(_STATE.dump_python(state), default=_plain, indent=1)
    _state_from_json(text, state.spec)
    return text


def _plain(value: object) -> object:
    """A set in order; what else JSON has no word for, such as a date in settings, as text."""
    return sorted(value) if isinstance(value, frozenset) else to_jsonable_python(value)


def _state_from_json(text: str, spec: RunSpec) -> RunState:
    document = json.loads(text)
    return _STATE.validate_python({"spec": spec} | document)


def _read(path: Path, spec: RunSpec, layout: Layout, *, is_newest: bool) -> Restored:
    manifest = _manifest(path)
    for name, sums in manifest["crc32c"].items():
        check(path / name, _pairs(sums))
    try:
        state = _state_from_json((path / "state.json").read_text(), spec)
    except ValidationError as error:
        raise ValueError(f"state.json: {error}") from error
    fragments = read_values(path, spec, layout)
    found = [digest_hex(fragment.broadcast_BxN) for fragment in fragments]
    if found != [fragment.digest for fragment in state.fragments]:
        raise ValueError("weights.safetensors does not have the digests of state.json")
    keys = _KEYS.validate_python([entry["key"] for entry in manifest["contributions"]])
    payloads = {
        key: Payload(
            entry["codec"],
            entry["raw_size"],
            entry["crc32c"],
            (path / "contributions" / f"{number}.bin").read_bytes(),
        )
        for number, (key, entry) in enumerate(zip(keys, manifest["contributions"], strict=True))
    }
    position = manifest.get("position")
    return Restored(path.name, state, fragments, payloads, position, is_newest)


def _manifest(path: Path) -> dict[str, Any]:
    """Of a snapshot. Raises what DAMAGE names where it is damaged, or of a format not known."""
    try:
        return unseal((path / "manifest.json").read_bytes(), FORMAT)
    except ValueError as error:
        raise ValueError(f"manifest.json: {error}") from error


def _pairs(sums: Any) -> list[tuple[int, int]]:
    """Checksums as the manifest has them."""
    return [(num_bytes, crc) for num_bytes, crc in sums]
