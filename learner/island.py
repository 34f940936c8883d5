"""One learner's copy of the model and what it owes the outer server.

The training thread steps and adopts; other threads answer asks and prepare
updates. They share no lock: the training thread publishes one immutable
`Completed` after every step, and takes prepared values from a queue.

Shape letters: B rows (blocks), N values per row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float32

from fragments.advance import advance
from fragments.codec import Codec
from fragments.digest import digest_hex
from fragments.errors import PayloadError
from fragments.layout import Layout
from fragments.payload import decode_f32
from fragments.quantize import Quantized, valid_counts
from fragments.records import (
    Adopted,
    Ask,
    Contribution,
    ContributionKey,
    Decline,
    DeclineReason,
    HeldBase,
    Update,
    Version,
)
from fragments.runspec import AdoptionSettings, CodecSettings
from fragments.tree import TreeCodec
from learner.held import Adoption, Answered, Base, Completed, Prepared
from learner.program import Params, Shard


class Island:
    """Model copy, bases and codec of one learner.

    Args:
        name: the learner's name, for contribution keys.
        layout: the run's layout.
        codec: the run's codec settings.
        params: a parameter tree of the model's structure; its values are kept
            only until the first fragments are adopted.
        cursor: the next batch of its shard.
        adoption: how new versions are taken in; overwriting, if not given.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        codec: CodecSettings,
        params: Params,
        cursor: int,
        adoption: AdoptionSettings | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self._codec = Codec.of(codec)
        self._step_fraction = codec.step_fraction_up
        self._adoption = adoption or AdoptionSettings()
        self._has_narrow_tensors = any(spec.dtype != "float32" for spec in layout.tensors)
        self._tree = TreeCodec(layout, params)
        self._valid = [jnp.asarray(valid_counts(f, layout.rows_padded)) for f in layout.fragments]
        nothing: tuple[Base | None, ...] = (None,) * len(layout.fragments)
        self.completed = Completed(0, 0, cursor, params, nothing)
        self._prepared_lock = threading.Lock()
        self._prepared: dict[int, Prepared] = {}
        self._arrived = threading.Event()
        self._newest: dict[int, Prepared] = {}
        self._answered: dict[int, Answered] = {}
        self._move: tuple[Shard, int] | None = None
        self._consumed: dict[int, Version] = {}
        self._refused: dict[int, Version] = {}

    def warm_up(self) -> None:
        """Compile everything that answering and adopting run, before training begins."""
        params = self.completed.params
        self._tree.warm_up(params)
        zeros_BxN = jnp.zeros((self.layout.rows_padded, self.layout.block), jnp.float32)
        quantized = self._reduce(0, self._tree.progress(0, zeros_BxN, params))
        part = self.layout.fragments[0]
        payload = self._codec.encode(part, quantized.codes, quantized.step_bits)
        advance(zeros_BxN, *self._codec.decode(part, self.layout.rows_padded, payload))

    def resume(self, kept: Completed) -> None:
        """Go on from what an earlier process had completed; before anything is adopted.

        Updates may follow on its bases; whether they are bases still, `begin` says.
        """
        self.completed = kept
        for fragment, base in enumerate(kept.bases):
            if base is not None:
                prepared = Prepared(fragment, base.version, base.value_BxN, base.digest)
                self._newest[fragment] = prepared

    def begin(self, newest: Sequence[Version], shard: Shard, cursor: int) -> None:
        """Where this process begins, as the server says: the newest versions, and the next batch.

        What an earlier process has trained on any other version is given up: the newest one will
        replace it, however the run adopts. So is what it has trained on another shard.
        """
        before = self.completed
        bases = tuple(
            base if base is not None and base.version == version else None
            for base, version in zip(before.bases, newest, strict=True)
        )
        now = replace(before, bases=bases, shard=shard, cursor=cursor)
        self.completed = now if before.shard == shard else self.from_bases(now)

    def move(self, shard: Shard, cursor: int) -> None:
        """Go on with other data from the next step on: another learner has this one's by now, and
        what was trained of it and is not sent is given up. Within a shard it only goes forward:
        from `cursor`, or from where training stands by then. Any thread may say so.
        """
        self._move = shard, cursor

    def moved(self, at: Completed) -> Completed | None:
        """`at` after a move, None where there is none; for the training thread, between steps."""
        move, self._move = self._move, None
        if move is None:
            return None
        shard, cursor = move
        if shard == at.shard:
            # What was trained since the move was told is told in turn: not a second time.
            cursor = max(cursor, at.cursor)
        return self.from_bases(replace(at, shard=shard, cursor=cursor))

    def consumed(self, versions: Sequence[int], epoch: int) -> None:
        """Learn from the server which base of each fragment counts as consumed (-1: none).

        The server's word replaces this side's: a contribution that never
        arrived consumed nothing.
        """
        self._consumed = {
            fragment: Version(epoch, number)
            for fragment, number in enumerate(versions)
            if number >= 0
        }

    def adopted(self) -> tuple[Adopted, ...]:
        """What is trained on now, as it is told to the server."""
        return tuple(
            Adopted(fragment, base.version, base.digest, base.step)
            for fragment, base in enumerate(self.completed.bases)
            if base is not None
        )

    def answered(self, key: ContributionKey) -> None:
        """An answer goes out once more, whatever the server has said: its base is consumed."""
        consumed = self._consumed.get(key.fragment)
        if consumed is None or consumed < key.base_version:
            self._consumed[key.fragment] = key.base_version

    def refused(self, key: ContributionKey) -> None:
        """The server will not have an answer: nothing made of its base will do."""
        self._refused[key.fragment] = key.base_version

    def unanswered(self, key: ContributionKey) -> None:
        """An answer was thrown away: its base is not consumed."""
        if self._consumed.get(key.fragment) == key.base_version:
            del self._consumed[key.fragment]

    def may_grow(self, made: Contribution) -> bool:
        """Whether a contribution that never arrived, as the server has said, can be made again with
        what was trained since on the same base: on that very one, not on one of its name that was
        begun anew. Where progress since an answer is kept by adopting, that goes out with the next.
        """
        key = made.key
        base = self.completed.bases[key.fragment]
        consumed = self._consumed.get(key.fragment)
        is_free = consumed is None or consumed < key.base_version
        if base is None or not is_free or self._adoption.mode == "rebase":
            return False
        return (base.version, base.cursor) == (key.base_version, made.cursor_from)

    def held_bases(self) -> tuple[HeldBase, ...]:
        """What this learner holds, as a joining process tells it."""
        now = self.completed
        return tuple(
            HeldBase(fragment, base.version, now.step - base.step, now.tokens - base.tokens)
            for fragment, base in enumerate(now.bases)
            if base is not None
        )

    def newest_version(self, fragment: int) -> Version | None:
        """The newest version prepared or adopted here; None for none."""
        prepared = self._newest.get(fragment)
        return prepared.version if prepared is not None else None

    def prepare(self, update: Update) -> None:
        """Decode an update, bring its value onto the device, check it, and queue it.

        Not for the training thread; one other thread calls it.

        Raises PayloadError when the update does not follow on what is held, or
        the value's digest is not the server's.
        """
        value_BxN, digest = self._value(update)
        if digest != update.digest:
            raise PayloadError(
                f"fragment {update.fragment} at version {update.version} has digest {digest} here, "
                f"the server says {update.digest}"
            )
        prepared = Prepared(update.fragment, update.version, value_BxN, digest)
        self._newest[update.fragment] = prepared
        # Only the newest value of a fragment is kept, however long the training thread takes.
        with self._prepared_lock:
            self._prepared[update.fragment] = prepared
        self._arrived.set()

    def forget(self, fragment: int) -> None:
        """Build on nothing held: the next update must be a full value."""
        self._newest.pop(fragment, None)

    def forget_all(self) -> None:
        """Build on nothing held of any fragment; what is trained on stays."""
        self._newest.clear()

    def _value(self, update: Update) -> tuple[Float32[Array, "B N"], str]:
        """What the update leads to, and its digest."""
        part = self.layout.fragments[update.fragment]
        if update.from_version is None:
            full_BxN = jnp.asarray(decode_f32(part, self.layout.rows_padded, update.payload))
            return full_BxN, digest_hex(full_BxN)
        held = self._newest.get(update.fragment)
        if held is None or held.version != update.from_version:
            raise PayloadError(
                f"an update of fragment {update.fragment} from version {update.from_version} "
                f"does not follow on {held.version if held else 'nothing'}"
            )
        codes, step_bits = self._codec.decode(part, self.layout.rows_padded, update.payload)
        return advance(held.value_BxN, codes, step_bits)

    def wait_prepared(self, timeout_s: float) -> bool:
        """Return True when something may be there to adopt, False after `timeout_s`."""
        return self._arrived.wait(timeout_s)

    def adopt(self, at: Completed) -> Adoption:
        """Take in the fragments that are prepared; for the training thread, between steps.

        How is the run's setting (`AdoptionSettings`). Inner optimizer state is
        kept. Dispatches device work and does not wait for it. Does not publish
        the result: a step that is still under way must not be answered from.
        """
        params, bases = at.params, at.bases
        adopted: list[Adopted] = []
        self._arrived.clear()
        with self._prepared_lock:
            prepared, self._prepared = self._prepared, {}
        for new in prepared.values():
            before = bases[new.fragment]
            if before is not None and before.version.epoch != new.version.epoch:
                before = None  # The run went back: nothing of what was trained since may stay.
            # Looked up once: an answer that is made meanwhile must not be taken for half of it.
            kept = self._kept_progress(new.fragment, before)
            local_BxN = self._adopted_value(new, params, before, kept)
            params = self._tree.replace(new.fragment, params, local_BxN)
            base = self._new_base(new, at if kept is None else kept.at)
            bases = (*bases[: new.fragment], base, *bases[new.fragment + 1 :])
            adopted.append(Adopted(new.fragment, new.version, new.digest, at.step))
        return Adoption(replace(at, params=params, bases=bases), tuple(adopted))

    def _new_base(self, new: Prepared, since: Completed) -> Base:
        """The base that `new` becomes; what is trained on it counts from `since`: the adoption, or,
        where progress since the last answer is kept, that answer.
        """
        return Base(new.version, new.value_BxN, new.digest, since.step, since.tokens, since.cursor)

    def _kept_progress(self, fragment: int, base: Base | None) -> Answered | None:
        """The answer since which local progress is kept by adopting; None where it is not."""
        answered = self._answered.get(fragment)
        if self._adoption.mode != "rebase" or answered is None or base is None:
            return None
        # That base, not one of its version: it may have been begun anew since (`from_bases`).
        return answered if answered.base is base else None

    def _adopted_value(
        self, new: Prepared, params: Params, base: Base | None, kept: Answered | None
    ) -> Float32[Array, "B N"]:
        """What the fragment becomes here, float32 (rows_padded, block)."""
        settings = self._adoption
        if base is None or settings.mode == "overwrite":
            return new.value_BxN
        local_BxN = self._tree.pack(new.fragment, params)
        if settings.mode == "alpha":
            alpha = jnp.float32(settings.alpha)
            mixed: Array = alpha * local_BxN + (jnp.float32(1) - alpha) * new.value_BxN
            return mixed
        if kept is None:
            return new.value_BxN
        return new.value_BxN + (local_BxN - kept.local_BxN)

    def from_bases(self, at: Completed) -> Completed:
        """`at` with the parameters of the bases, and nothing trained on them: each is begun anew,
        and no answer made before has a part in what follows.
        """
        params, bases = at.params, at.bases
        for fragment, base in enumerate(at.bases):
            if base is None:
                continue
            params = self._tree.replace(fragment, params, base.value_BxN)
            base = replace(base, step=at.step, tokens=at.tokens, cursor=at.cursor)
            bases = (*bases[:fragment], base, *bases[fragment + 1 :])
        return replace(at, params=params, bases=bases)

    def answer(self, ask: Ask) -> Contribution | Decline:
        """The pseudo-gradient (base - local) of the asked fragment, or why there is none.

        From the last completed step; not for the training thread. Waits for
        the device. Raises PayloadError when the codec cannot encode it.
        """
        now = self.completed
        base = now.bases[ask.fragment]
        reason: DeclineReason | None = None
        if base is None or base.version.epoch != ask.version.epoch:
            return Decline(ask.fragment, ask.version, DeclineReason.NO_BASE)
        consumed = self._consumed.get(ask.fragment)
        if consumed is not None and base.version <= consumed:
            reason = DeclineReason.CONSUMED
        elif now.step <= base.step:
            reason = DeclineReason.NO_STEPS
        if reason is not None:
            # Of one that was refused the server knows well.
            is_known = self._refused.get(ask.fragment) == base.version
            is_spent = reason is DeclineReason.CONSUMED and not is_known
            return Decline(ask.fragment, ask.version, reason, base.version if is_spent else None)
        base_BxN = self._as_trained(ask.fragment, base)
        again = self._kept_progress(ask.fragment, base)
        if again is None:
            progress_BxN = self._tree.progress(ask.fragment, base_BxN, now.params)
        else:
            # What was trained since that answer is kept by adopting, and goes out with the next.
            now, progress_BxN = again.at, base_BxN - again.local_BxN
        quantized = self._reduce(ask.fragment, progress_BxN)
        if not bool(quantized.finite):
            return Decline(ask.fragment, ask.version, DeclineReason.NOT_FINITE)
        part = self.layout.fragments[ask.fragment]
        payload = self._codec.encode(part, quantized.codes, quantized.step_bits)
        self._consumed[ask.fragment] = base.version
        if self._adoption.mode == "rebase" and again is None:
            local_BxN = self._tree.pack(ask.fragment, now.params)
            self._answered[ask.fragment] = Answered(base, local_BxN, now)
        return Contribution(
            key=ContributionKey(self.name, ask.fragment, base.version),
            asked_version=ask.version,
            steps=now.step - base.step,
            tokens=now.tokens - base.tokens,
            cursor_from=base.cursor,
            cursor_to=now.cursor,
            payload=payload,
            base_digest=base.digest,
        )

    def _as_trained(self, fragment: int, base: Base) -> Float32[Array, "B N"]:
        """The base in the parameters' own dtype, as training began from it: where that is
        narrower than float32, rounding is no progress and must not be sent as such.
        """
        if not self._has_narrow_tensors:
            return base.value_BxN
        cast = self._tree.replace(fragment, self.completed.params, base.value_BxN)
        return self._tree.pack(fragment, cast)

    def _reduce(self, fragment: int, progress_BxN: Float32[Array, "B N"]) -> Quantized:
        return self._codec.reduce(progress_BxN, self._valid[fragment], self._step_fraction)
