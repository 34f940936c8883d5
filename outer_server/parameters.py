"""The tensors of a run, and the one thread's work on them: merge, step, encode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from fragments.codec import Codec
from fragments.digest import digest_hex
from fragments.errors import NonFiniteError, SettingsError
from fragments.layout import FragmentLayout, Layout
from fragments.payload import Payload, encode_f32
from fragments.quantize import flush_subnormals, valid_counts
from fragments.records import ContributionKey, Update, Version
from fragments.runspec import OuterSettings, RunSpec
from outer_server.core.merge import Encoded, Part, merge
from outer_server.core.state import MergeOrder
from outer_server.core.step import (
    FragmentParameters,
    OuterStep,
    make_closing_step,
    make_outer_step,
    newborn,
    outer_optimizer,
)
from outer_server.decoded import Decoded

_DECODED_SHARE = 12
"""One byte for so many parameters is kept decoded: 2% of the model in float32, or what two
contributions take with 24 fragments."""


class Parameters:
    """Master, broadcast copy and outer state of every fragment.

    Not thread-safe, but for `check`: one thread calls `apply`. `fragments` is replaced, never
    changed in place, so that other threads may read an entry at any time.
    """

    def __init__(
        self, spec: RunSpec, layout: Layout, fragments: Sequence[FragmentParameters]
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.fragments: tuple[FragmentParameters, ...] = tuple(fragments)
        self._valid = [jnp.asarray(valid_counts(f, layout.rows_padded)) for f in layout.fragments]
        self.codec = Codec.of(spec.codec)
        self._decoded = Decoded(layout.num_values // _DECODED_SHARE)
        self._fraction = spec.codec.step_fraction_down
        self._step = make_outer_step(spec.outer, self.codec, self._fraction)
        self._closing_step = make_closing_step(self.codec, self._fraction)

    @staticmethod
    def newborn(
        spec: RunSpec, layout: Layout, values: Sequence[Float32[np.ndarray, "B N"]]
    ) -> Parameters:
        """Version 0 from one fragment value each, float32 (rows_padded, block).

        Raises NonFiniteError when a value is not finite.
        """
        optimizer = outer_optimizer(spec.outer)
        fragments = []
        for index, value in enumerate(values):
            if not np.isfinite(value).all():
                raise NonFiniteError(f"initial weights of fragment {index} are not finite")
            fragments.append(newborn(optimizer, flush_subnormals(jnp.asarray(value))))
        return Parameters(spec, layout, fragments)

    def digests(self) -> tuple[str, ...]:
        """Digest of each fragment's broadcast copy."""
        return tuple(digest_hex(fragment.broadcast_BxN) for fragment in self.fragments)

    def warm_up(self) -> None:
        """Compile merge and step, so that the first round does not wait for it."""
        shape = (self.layout.rows_padded, self.layout.block)
        zeros_BxN = jnp.zeros(shape, jnp.float32)
        reduced = self.codec.reduce(zeros_BxN, self._valid[0], 1.0)
        part = self.layout.fragments[0]
        silent = self._decode(0, self.codec.encode(part, reduced.codes, reduced.step_bits))
        radial = self.spec.merge == "rda"
        for step, is_radial in ((self._step, radial), (self._closing_step, False)):
            parts = [Part(1.0, (silent,))]
            merged_BxN = self._merge(self.layout.fragments[0], parts, radial=is_radial)
            bool(step(self.fragments[0], merged_BxN, self._valid[0]).finite)

    def apply(
        self, order: MergeOrder, payloads: Mapping[ContributionKey, Payload], epoch: int
    ) -> tuple[Update, FragmentParameters]:
        """Merge the order's contributions and take the fragment one version on.

        Returns the update to publish and the fragment's new values.

        Raises PayloadError for a payload that cannot be read, NonFiniteError
        when the step overflows; then nothing has changed.
        """
        index = order.fragment
        layout = self.layout.fragments[index]
        radial = (order.merge or self.spec.merge) == "rda" and not order.closing
        merged_BxN = self._merge(layout, self._parts(order, payloads), radial=radial)
        stepped = self._step_of(order)(self.fragments[index], merged_BxN, self._valid[index])
        if not bool(stepped.finite):
            raise NonFiniteError(
                f"the outer step of fragment {index} from version {order.version} is not finite"
            )
        payload = self.codec.encode(layout, stepped.codes_BxN, stepped.step_bits_B)
        self.fragments = (
            *self.fragments[:index],
            stepped.parameters,
            *self.fragments[index + 1 :],
        )
        update = Update(
            fragment=index,
            version=Version(epoch, order.version + 1),
            from_version=Version(epoch, order.version),
            digest=stepped.digest,
            payload=payload,
        )
        return update, stepped.parameters

    def stand(self, order: MergeOrder, epoch: int) -> tuple[Update, FragmentParameters]:
        """The fragment one version on without a step: an update that adds nothing."""
        index = order.fragment
        payload = self.codec.nothing(self.layout.fragments[index], self.layout.rows_padded)
        update = Update(
            fragment=index,
            version=Version(epoch, order.version + 1),
            from_version=Version(epoch, order.version),
            digest=digest_hex(self.fragments[index].broadcast_BxN),
            payload=payload,
        )
        return update, self.fragments[index]

    def _step_of(self, order: MergeOrder) -> OuterStep:
        """With the settings that were in force when the round closed."""
        if order.closing:
            return self._closing_step
        if order.outer is None or order.outer == self.spec.outer:
            return self._step
        return make_outer_step(order.outer, self.codec, self._fraction)

    def _merge(
        self, layout: FragmentLayout, parts: Iterable[Part], *, radial: bool
    ) -> Float32[np.ndarray, "B N"]:
        return merge(parts, layout, self.layout.rows_padded, radial=radial)

    def full(self, index: int, broadcast_BxN: Float32[jax.Array, "B N"]) -> Payload:
        """A fragment's broadcast copy, float32 (rows_padded, block), encoded exactly.

        Raises NonFiniteError for a value that is not finite.
        """
        layout = self.layout.fragments[index]
        return encode_f32(layout, np.asarray(broadcast_BxN), self.spec.codec.zstd_level)

    def _parts(
        self, order: MergeOrder, payloads: Mapping[ContributionKey, Payload]
    ) -> Iterator[Part]:
        """The participants' contributions, each decoded when it is asked for."""
        for participant in order.participants:
            keys = [meta.key for meta in participant.contributions]
            encoded = tuple(
                self._decoded.take(payloads[key]) or self._decode(order.fragment, payloads[key])
                for key in keys
            )
            yield Part(participant.share, encoded)

    def check(self, fragment: int, payload: Payload) -> None:
        """Raise PayloadError for one that no merge could take. Any thread may call it."""
        self._decoded.keep(payload, self._decode(fragment, payload))

    def check_outer(self, settings: OuterSettings) -> None:
        """Raise SettingsError for an outer optimizer that cannot go on from the present state."""
        held = self.fragments[0]
        there = jax.eval_shape(outer_optimizer(settings).init, held.broadcast_BxN)
        if str(jax.tree.structure(there)) != str(jax.tree.structure(held.outer)):
            raise SettingsError(
                "the outer optimizer's state would be another with these settings (no momentum has "
                "none): that cannot be changed while the run is trained"
            )

    def _decode(self, fragment: int, payload: Payload) -> Encoded:
        layout = self.layout.fragments[fragment]
        return self.codec.decode(layout, self.layout.rows_padded, payload)
