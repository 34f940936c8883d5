"""A bench of thin links as Markdown."""

from __future__ import annotations

from harness.thin.result import LEAST_RATIO, LEAST_UTILISATION, ThinResult, hidden_gain
from harness.words import count_text


def report(result: ThinResult) -> str:
    """The claim, the curve, what it cost the machine, and what is real and what is modelled."""
    return "\n\n".join(
        [
            f"# Thin links: {_headline(result)}",
            _what(result),
            _claim(result),
            _curve(result),
            _traffic(result),
            _real(result),
        ]
    )


def _headline(result: ThinResult) -> str:
    """What was met and what was missed; `_claim` says more."""
    claim = result.claim
    if claim is None:
        return "the claim fails: on no link does Decoupled keep its utilisation and its schedule"
    ratio = f"{claim.ratio:.1f} times the tokens a second at {claim.rate_mbit:g} Mbit/s"
    wide = f"data-parallel {claim.utilisation_wide:.1%} utilised on the widest link"
    met, missed = [], []
    for text, is_met, bound in (
        (ratio, claim.ratio >= LEAST_RATIO, f"{LEAST_RATIO:g}"),
        (wide, claim.utilisation_wide >= LEAST_UTILISATION, f"{LEAST_UTILISATION:.0%}"),
    ):
        if is_met:
            met.append(text)
        else:
            missed.append(f"{text} (not {bound})")
    if not missed:
        return f"the claim holds: {' and '.join(met)}"
    words = f"the claim fails: missed {' and '.join(missed)}"
    return f"{words}; met {met[0]}" if met else words


def _what(result: ThinResult) -> str:
    return (
        f"{result.learners} learners with {count_text(result.parameters)} parameters and"
        f" {result.tokens_per_step} tokens a step, whose computing takes {result.pace_s:g} s; every"
        f" site, the server's too, has one link of the rate in the table, both ways{_far(result)}."
        " Decoupled:"
        f" H = {result.sync_interval_steps}, {result.fragments} fragments, {result.codec}."
        " Data-parallel exchanges gradients at 16 bits a value in every step. What is done,"
        " `diloco bench links --help` says."
    )


def _far(result: ThinResult) -> str:
    if not result.delay_ms:
        return ""
    measured = result.round_trip_ms
    trip = "" if measured is None else f" (a round trip takes {measured:.1f} ms, measured)"
    return f"; any two are {result.delay_ms:g} ms apart, one way{trip}"


def _claim(result: ThinResult) -> str:
    claim = result.claim
    if claim is None:
        return "On no link of the curve Decoupled keeps 95% of its utilisation and its schedule."
    lacks = []
    if claim.ratio < LEAST_RATIO:
        lacks.append(f"it is less than {LEAST_RATIO:g} times")
    if claim.utilisation_wide < LEAST_UTILISATION:
        lacks.append(f"data-parallel is less than {LEAST_UTILISATION:.0%} utilised on the widest")
    verdict = f"The claim does not hold: {' and '.join(lacks)}." if lacks else "The claim holds."
    return (
        f"{verdict} At {claim.rate_mbit:g} Mbit/s, the thinnest link at which Decoupled keeps 95%"
        f" of its utilisation (here {claim.kept:.1%}) and of its rounds, its tokens a second are"
        f" **{claim.ratio:.1f}** times those of data-parallel training; {claim.ratio_merged:.1f}"
        f" times if only merged tokens count; {claim.ratio_hidden:.1f} times if data-parallel hid"
        " all of its exchange behind its computing, which it does not do here. On the widest link"
        f" data-parallel is {claim.utilisation_wide:.1%} utilised."
    )


def _curve(result: ThinResult) -> str:
    head = (
        "| Mbit/s | Decoupled, tokens/s | data-parallel, tokens/s | ratio | exchange hidden |"
        " Decoupled utilised | data-parallel utilised | rounds on schedule | merged |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    lines = [
        f"| {dp.rate_mbit:g} | {ours.tokens_per_s:,.0f} | {dp.tokens_per_s:,.1f}"
        f" | {ours.tokens_per_s / dp.tokens_per_s:.1f}"
        f" | {ours.tokens_per_s / dp.tokens_per_s / hidden_gain(dp.step_s, result.pace_s):.1f}"
        f" | {ours.utilisation:.1%} | {dp.utilisation:.1%} | {ours.on_schedule:.1%}"
        f" | {ours.merged_share:.1%} |"
        for dp, ours in zip(result.data_parallel, result.decoupled, strict=True)
    ]
    return "\n".join([head, *lines])


def _traffic(result: ThinResult) -> str:
    head = (
        "| Mbit/s | Decoupled: a learner's link, Mbit/s | the server's | data-parallel: MB a step |"
        " a step, s | steps measured | cores in use |\n|--:|--:|--:|--:|--:|--:|--:|"
    )
    lines = [
        f"| {dp.rate_mbit:g} | {ours.learner_mbit:.2f} | {ours.server_mbit:.2f}"
        f" | {dp.step_bytes / 1e6:.2f} | {dp.step_s:.3f} | {ours.steps}, {dp.steps}"
        f" | {ours.cores_busy:.0%}, {dp.cores_busy:.0%} |"
        for dp, ours in zip(result.data_parallel, result.decoupled, strict=True)
    ]
    return "\n".join([head, *lines])


def _real(result: ThinResult) -> str:
    return (
        "Real: processes, model, gradients and optimizers of both; the outer server with its"
        " journal; gRPC, Gloo, TCP and the kernel's shaping (token buckets in network namespaces);"
        " bytes, as the kernel counts them at the sites' devices.\n"
        f"Modelled: that computing a step takes {result.pace_s:g} s. Both compute less and sleep"
        " for the rest, so that not this machine's cores are compared. Links have"
        f" {'that' if result.delay_ms else 'no'} delay{_made(result)} and lose"
        " only what their queue has no room for. Utilisation is that time over the mean step."
        " *Merged* leaves out the steps between an answer and the adoption of what came of it."
        " *Exchange hidden* is computed: a step of data-parallel would take the longer of computing"
        " and exchange."
    )


def _made(result: ThinResult) -> str:
    return f" (made by {result.delayed_by})" if result.delayed_by else ""
