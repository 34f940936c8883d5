"""The only package that knows both protobuf and records.

Every record goes to the wire by `<noun>_to_wire` and comes back, equal, by `<noun>_from_wire`.
A value that this version does not know (an enum number from a newer peer) raises `RefusedError`
(MISMATCH); an unknown kind of note comes back as None, to be ignored, as the contract says.
Nothing else is checked here: who may say what is decided elsewhere.
"""

from services.translate.bulk import (
    contribution_from_wire,
    contribution_to_wire,
    key_from_wire,
    key_to_wire,
    outcome_from_wire,
    outcome_to_wire,
    payload_from_wire,
    payload_to_wire,
    update_from_wire,
    update_to_wire,
)
from services.translate.control import (
    LearnerNote,
    learner_note_from_wire,
    learner_note_to_wire,
    note_from_wire,
    note_to_wire,
)
from services.translate.joining import (
    description_from_wire,
    description_to_wire,
    hello_from_wire,
    hello_to_wire,
    welcome_from_wire,
    welcome_to_wire,
)
from services.translate.status import status_from_wire, status_to_wire
from services.translate.words import (
    lease_from_wire,
    lease_to_wire,
    version_from_wire,
    version_to_wire,
)

__all__ = [
    "LearnerNote",
    "contribution_from_wire",
    "contribution_to_wire",
    "description_from_wire",
    "description_to_wire",
    "hello_from_wire",
    "hello_to_wire",
    "key_from_wire",
    "key_to_wire",
    "learner_note_from_wire",
    "learner_note_to_wire",
    "lease_from_wire",
    "lease_to_wire",
    "note_from_wire",
    "note_to_wire",
    "outcome_from_wire",
    "outcome_to_wire",
    "payload_from_wire",
    "payload_to_wire",
    "status_from_wire",
    "status_to_wire",
    "update_from_wire",
    "update_to_wire",
    "version_from_wire",
    "version_to_wire",
    "welcome_from_wire",
    "welcome_to_wire",
]
