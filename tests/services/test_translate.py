from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.v1 import control_pb2, pull_pb2, push_pb2, status_pb2
from fragments import records
from fragments.errors import RefusedError
from fragments.payload import Payload
from services import translate

# While tests run, the types of records are checked as they are built, and the checker looks at a
# random item of each tuple; hypothesis takes that for an unrepeatable strategy.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=12)
# Wider than a double's own round trip needs; NaN, which equals nothing, has a test of its own.
FLOAT = st.floats(allow_nan=False)

VERSIONS = st.builds(records.Version, U64, U64)
LEASES = st.builds(records.Lease, TEXT, U64, FLOAT)
PHASES = st.sampled_from(records.Phase)
PAYLOADS = st.builds(Payload, TEXT, U64, U32, st.binary(max_size=20))
KEYS = st.builds(records.ContributionKey, TEXT, U32, VERSIONS)
REFUSALS = st.builds(records.Refusal, st.sampled_from(records.RefusalCode), TEXT)
DESCRIPTIONS = st.builds(
    records.RunDescription,
    TEXT,
    U32,
    TEXT,
    TEXT,
    TEXT,
    U32,
    TEXT,
    U64,
    U64,
    PHASES,
    FLOAT,
    FLOAT,
)
BASES = st.builds(records.HeldBase, U32, VERSIONS, U64, U64)
HELLOS = st.builds(
    records.Hello, U32, TEXT, TEXT, TEXT, st.sampled_from(records.Role), TEXT,
    st.lists(BASES, max_size=3).map(tuple), U64, U64,
)  # fmt: skip
NUMBERS = st.lists(U64, max_size=4).map(tuple)
CONSUMED = st.lists(st.integers(-1, 2**64 - 2), max_size=4).map(tuple)
WELCOMES = st.builds(
    records.Welcome, LEASES, U64, U64, PHASES, NUMBERS, CONSUMED, U32, U32, U64, U64, U64, FLOAT
)
REPORTS = st.builds(
    records.Report, U64, U64, U64, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, st.booleans()
)
DECLINES = st.builds(records.Decline, U32, VERSIONS, st.sampled_from(records.DeclineReason))
ADOPTED = st.builds(records.Adopted, U32, VERSIONS, TEXT, U64)
EVALUATIONS = st.builds(records.Evaluation, FLOAT, TEXT, U64, U64, NUMBERS)
NOTES = st.one_of(
    st.builds(records.Ask, U32, VERSIONS),
    st.builds(records.Published, U32, VERSIONS),
    st.builds(records.Progress, U64, U64, PHASES),
    st.builds(records.Goodbye, st.none() | st.sampled_from(records.RefusalCode), TEXT),
)
CONTRIBUTIONS = st.builds(records.Contribution, KEYS, VERSIONS, U64, U64, U64, U64, PAYLOADS)
RECEIPTS = st.builds(records.Receipt, KEYS, st.booleans(), st.booleans())
UPDATES = st.builds(records.Update, U32, VERSIONS, st.none() | VERSIONS, TEXT, PAYLOADS)
FRAGMENT_STATUS = st.builds(records.FragmentStatus, U32, U64, TEXT, U64, st.booleans(), U32, U32)
LEARNER_STATUS = st.builds(
    records.LearnerStatus, TEXT, st.sampled_from(records.LearnerState), U64, U64, U64, U64, U64,
    U32, U64, U64, U64, U64, U64, FLOAT, FLOAT, FLOAT, FLOAT, U64, U64, TEXT, FLOAT,
    FLOAT, FLOAT, FLOAT, st.booleans(),
)  # fmt: skip
EVALUATION_STATUS = st.builds(records.EvaluationStatus, FLOAT, TEXT, U64, U64, FLOAT, TEXT)
STATUSES = st.builds(
    records.RunStatus, TEXT, PHASES, TEXT, U64, U64, U64, U64, U64, U64, U64, U64, U64, FLOAT,
    FLOAT, U64, U64, U32, TEXT, st.lists(FRAGMENT_STATUS, max_size=2).map(tuple),
    st.lists(LEARNER_STATUS, max_size=2).map(tuple),
    st.lists(EVALUATION_STATUS, max_size=2).map(tuple), FLOAT, FLOAT, FLOAT, FLOAT,
)  # fmt: skip


@given(DESCRIPTIONS)
def test_a_description_comes_back_equal(run: records.RunDescription) -> None:
    wire = translate.description_to_wire(run).SerializeToString()
    parsed = control_pb2.DescribeRunResponse.FromString(wire)
    assert translate.description_from_wire(parsed) == run


@given(HELLOS)
def test_a_hello_comes_back_equal(hello: records.Hello) -> None:
    wire = translate.hello_to_wire(hello).SerializeToString()
    assert translate.hello_from_wire(control_pb2.JoinRequest.FromString(wire)) == hello


@given(WELCOMES)
def test_a_welcome_comes_back_equal(welcome: records.Welcome) -> None:
    wire = translate.welcome_to_wire(welcome).SerializeToString()
    assert translate.welcome_from_wire(control_pb2.JoinResponse.FromString(wire)) == welcome


@given(LEASES | REPORTS | DECLINES | ADOPTED | EVALUATIONS)
def test_what_a_learner_says_comes_back_equal(note: translate.LearnerNote) -> None:
    wire = translate.learner_note_to_wire(note).SerializeToString()
    assert translate.learner_note_from_wire(control_pb2.ControlRequest.FromString(wire)) == note


@given(NOTES, U64)
def test_what_the_server_says_comes_back_equal(note: records.ServerNote, generation: int) -> None:
    wire = translate.note_to_wire(note, generation).SerializeToString()
    parsed = control_pb2.ControlResponse.FromString(wire)
    assert translate.note_from_wire(parsed) == note
    assert parsed.generation == generation


@given(CONTRIBUTIONS, U64)
def test_a_contribution_comes_back_equal(sent: records.Contribution, offset: int) -> None:
    lease = records.Lease(sent.key.learner, 3, 15.0)
    wire = translate.contribution_to_wire(sent, lease, "run", "digest", offset)
    parsed = push_pb2.PushHeader.FromString(wire.SerializeToString())
    assert translate.contribution_from_wire(parsed, sent.payload.data) == sent
    assert translate.lease_from_wire(parsed.lease) == lease
    assert (parsed.key.run_id, parsed.layout_digest, parsed.offset) == ("run", "digest", offset)
    assert parsed.payload.wire_bytes == len(sent.payload.data)


@given(RECEIPTS | REFUSALS)
def test_an_outcome_comes_back_equal(outcome: records.Receipt | records.Refusal) -> None:
    learner = outcome.key.learner if isinstance(outcome, records.Receipt) else "eu"
    wire = translate.outcome_to_wire(outcome, "run", 7).SerializeToString()
    parsed = push_pb2.PushResponse.FromString(wire)
    assert translate.outcome_from_wire(parsed, learner) == outcome
    assert parsed.generation == 7


@given(UPDATES)
def test_an_update_comes_back_equal(update: records.Update) -> None:
    wire = translate.update_to_wire(update, 7).SerializeToString()
    parsed = pull_pb2.UpdateHeader.FromString(wire)
    assert translate.update_from_wire(parsed, update.payload.data) == update
    assert parsed.generation == 7


@given(STATUSES)
def test_a_status_comes_back_equal(status: records.RunStatus) -> None:
    wire = translate.status_to_wire(status).SerializeToString()
    assert translate.status_from_wire(status_pb2.RunStatus.FromString(wire)) == status


def test_an_unknown_loss_stays_unknown() -> None:
    report = records.Report(step=1, tokens=2, cursor=3)
    back = translate.learner_note_from_wire(translate.learner_note_to_wire(report))
    assert isinstance(back, records.Report)
    assert math.isnan(back.loss)
    assert replace(back, loss=0.0) == replace(report, loss=0.0)


def test_what_a_newer_peer_may_add_is_ignored_or_refused_with_a_sentence() -> None:
    assert translate.note_from_wire(control_pb2.ControlResponse(generation=1)) is None
    assert translate.learner_note_from_wire(control_pb2.ControlRequest()) is None
    with pytest.raises(RefusedError, match=r"phase 0.*update the older"):
        translate.description_from_wire(control_pb2.DescribeRunResponse())
    with pytest.raises(RefusedError, match="refusal code 0"):
        translate.outcome_from_wire(push_pb2.PushResponse(), "eu")
