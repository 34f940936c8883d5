"""The stages of a synchronisation, each alone: how much it costs on this machine.

Figures are by GB of float32 parameters (10^9 bytes, 4 a parameter), so that they can be added up.
Each stage runs at the shape of the run's fragments, in a process with the environment that it has
in a run: one computing thread, and on the server the arithmetic of the server.

Shape letters: B rows, N values a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fragments.advance import advance
from fragments.codec import Codec
from fragments.layout import Layout
from fragments.memory import computed
from fragments.payload import decode_int8, encode_int8
from fragments.quantize import Quantized, valid_counts
from fragments.runspec import RunSpec
from fragments.tree import TreeCodec
from harness.programs import load_program
from harness.wire.ceiling import Ceiling, measured
from learner.member import layout_of
from outer_server.core.merge import Part, merge
from outer_server.core.step import make_outer_step, newborn, outer_optimizer


@dataclass(frozen=True, slots=True)
class _Subject:
    """A fragment and values for it, as a run has them."""

    spec: RunSpec
    layout: Layout
    tree: TreeCodec
    params: object
    local: object
    base_BxN: jax.Array
    progress_BxN: jax.Array
    valid_B: jax.Array

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.layout.fragments[0].num_values


def subject(spec: RunSpec) -> _Subject:
    """Fragment 0 of the run's program; all of its fragments are alike."""
    program = load_program(spec, None)
    params = program.init_params(spec.seed)
    layout = layout_of(program, params, spec)
    tree = TreeCodec(layout, params)
    draw = np.random.default_rng(1)
    base_BxN = tree.pack(0, params)
    noise_BxN = draw.standard_normal(base_BxN.shape, np.float32) * np.float32(0.01)
    local = tree.replace(0, params, base_BxN + noise_BxN)
    progress_BxN = tree.progress(0, base_BxN, local)
    valid_B = jnp.asarray(valid_counts(layout.fragments[0], layout.rows_padded))
    return _Subject(spec, layout, tree, params, local, base_BxN, progress_BxN, valid_B)


def learner_stages(of: _Subject) -> dict[str, Ceiling]:
    """What a learner does to a fragment, and a copy in memory to compare with."""
    fragment, rows = of.layout.fragments[0], of.layout.rows_padded
    source = np.asarray(of.base_BxN)
    target = np.empty_like(source)
    codes, step_bits = _encoded(of)
    payload = encode_int8(fragment, codes, step_bits, of.spec.codec.zstd_level)
    stages: dict[str, Callable[[], object]] = {
        "memory_copy": lambda: np.copyto(target, source),
        "progress": lambda: of.tree.progress(0, of.base_BxN, of.local),
        "quantize": lambda: computed(_reduced(of)),
        "encode": lambda: encode_int8(fragment, codes, step_bits, of.spec.codec.zstd_level),
        "decode": lambda: decode_int8(fragment, rows, payload),
        "advance": lambda: advance(of.base_BxN, codes, step_bits),
        "unpack": lambda: computed(of.tree.replace(0, of.params, of.base_BxN)),
    }
    return {name: measured(_silent(work), of.fp32_bytes) for name, work in stages.items()}


def server_stages(of: _Subject, learners: int) -> dict[str, Ceiling]:
    """What the server does with decoded contributions, `merge` by contribution."""
    fragment, rows = of.layout.fragments[0], of.layout.rows_padded
    encoded = _encoded(of)
    parts = [Part(1.0 / learners, (encoded,)) for _ in range(learners)]
    radial = of.spec.merge == "rda"
    step = make_outer_step(of.spec.outer, Codec.of(of.spec.codec), of.spec.codec.step_fraction_down)
    parameters = newborn(outer_optimizer(of.spec.outer), of.base_BxN)

    def merged() -> np.ndarray:
        return merge(parts, fragment, rows, radial=radial)

    # A step uses it up: what it leaves there serves the next as well.
    whole = merged()
    return {
        "merge": measured(_silent(merged), learners * of.fp32_bytes),
        "outer_step": measured(
            _silent(lambda: computed(step(parameters, whole, of.valid_B))), of.fp32_bytes
        ),
    }


def _encoded(of: _Subject) -> tuple[np.ndarray, np.ndarray]:
    reduced = _reduced(of)
    return np.asarray(reduced.codes), np.asarray(reduced.step_bits)


def _reduced(of: _Subject) -> Quantized:
    codec, fraction = Codec.of(of.spec.codec), of.spec.codec.step_fraction_up
    return codec.reduce(of.progress_BxN, of.valid_B, fraction)


def _silent(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        work()

    return run
