"""What is said on a control stream, both ways."""

from __future__ import annotations

from diloco.v1 import common_pb2, control_pb2
from fragments.records import (
    Adopted,
    Ask,
    Decline,
    DeclineReason,
    Evaluation,
    Goodbye,
    Lease,
    Progress,
    Published,
    Report,
    ServerNote,
)
from services.translate.words import (
    PHASES,
    REFUSALS,
    known,
    lease_from_wire,
    lease_to_wire,
    same,
    version_from_wire,
    version_to_wire,
)

LearnerNote = Lease | Report | Decline | Adopted | Evaluation
"""What a learner says on a control stream; a `Lease` attaches the stream."""

_DECLINES = {
    DeclineReason.NO_STEPS: control_pb2.DECLINE_REASON_NO_STEPS,
    DeclineReason.NOT_FINITE: control_pb2.DECLINE_REASON_NOT_FINITE,
    DeclineReason.CONSUMED: control_pb2.DECLINE_REASON_CONSUMED,
    DeclineReason.NO_BASE: control_pb2.DECLINE_REASON_NO_BASE,
}


def learner_note_to_wire(note: LearnerNote) -> control_pb2.ControlRequest:
    """One message up."""
    match note:
        case Lease():
            attach = control_pb2.Attach(lease=lease_to_wire(note))
            return control_pb2.ControlRequest(attach=attach)
        case Report():
            return control_pb2.ControlRequest(report=control_pb2.Report(**same(note, Report)))
        case Decline():
            base = note.consumed_base
            decline = control_pb2.Decline(
                fragment=note.fragment,
                version=version_to_wire(note.version),
                reason=_DECLINES[note.reason],
                consumed_base=None if base is None else version_to_wire(base),
            )
            return control_pb2.ControlRequest(decline=decline)
        case Adopted():
            adopted = control_pb2.Adopted(
                version=version_to_wire(note.version), **same(note, Adopted, "version")
            )
            return control_pb2.ControlRequest(adopted=adopted)
        case Evaluation():
            evaluation = control_pb2.Evaluation(**same(note, Evaluation))
            return control_pb2.ControlRequest(evaluation=evaluation)


def learner_note_from_wire(wire: control_pb2.ControlRequest) -> LearnerNote | None:
    """The inverse; None for a kind of message that is not known here."""
    match wire.WhichOneof("message"):
        case "attach":
            return lease_from_wire(wire.attach.lease)
        case "report":
            return Report(**same(wire.report, Report))
        case "decline":
            reason = known(_DECLINES, wire.decline.reason, "decline reason")
            base = (
                version_from_wire(wire.decline.consumed_base)
                if wire.decline.HasField("consumed_base")
                else None
            )
            version = version_from_wire(wire.decline.version)
            return Decline(wire.decline.fragment, version, reason, base)
        case "adopted":
            version = version_from_wire(wire.adopted.version)
            return Adopted(version=version, **same(wire.adopted, Adopted, "version"))
        case "evaluation":
            versions = tuple(wire.evaluation.versions)
            shared = same(wire.evaluation, Evaluation, "versions")
            return Evaluation(versions=versions, **shared)
        case _:
            return None


def note_to_wire(note: ServerNote, generation: int) -> control_pb2.ControlResponse:
    """One message down, stamped with the server's generation."""
    wire = control_pb2.ControlResponse(generation=generation)
    match note:
        case Ask():
            ask = control_pb2.Ask(fragment=note.fragment, version=version_to_wire(note.version))
            wire.ask.CopyFrom(ask)
        case Published():
            version = version_to_wire(note.version)
            wire.published.CopyFrom(control_pb2.Published(fragment=note.fragment, version=version))
        case Progress():
            shared = same(note, Progress, "phase")
            wire.progress.CopyFrom(control_pb2.Progress(phase=PHASES[note.phase], **shared))
        case Goodbye():
            code = common_pb2.REFUSAL_CODE_UNSPECIFIED
            code = code if note.code is None else REFUSALS[note.code]
            wire.goodbye.CopyFrom(control_pb2.Goodbye(code=code, reason=note.reason))
    return wire


def note_from_wire(wire: control_pb2.ControlResponse) -> ServerNote | None:
    """The inverse, without the stamp; None for a kind of note that is not known here."""
    match wire.WhichOneof("message"):
        case "ask":
            return Ask(wire.ask.fragment, version_from_wire(wire.ask.version))
        case "published":
            return Published(wire.published.fragment, version_from_wire(wire.published.version))
        case "progress":
            phase = known(PHASES, wire.progress.phase, "phase")
            return Progress(phase=phase, **same(wire.progress, Progress, "phase"))
        case "goodbye":
            number = wire.goodbye.code
            code = known(REFUSALS, number, "refusal code") if number else None
            return Goodbye(code, wire.goodbye.reason)
        case _:
            return None
