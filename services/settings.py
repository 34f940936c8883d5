"""Bounds and patience of the network side. Every one is local to its process."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fragments.chunks import CHUNK_BYTES

MESSAGE_BYTES = 4 << 20
"""gRPC's own default: no message of ours comes near, so a larger one is not from us."""

BULK_DEADLINE_LIMIT_S = 3600.0
"""Longest deadline that a push or pull may ask for: what a stuck peer can cost a thread."""

CapMbit = Annotated[float, Field(ge=0.1, allow_inf_nan=False)] | None
"""A cap in Mbit/s (10^6 bits); None for no cap. Under 0.1 a chunk would be mostly header."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Settings):
    """Where and within what bounds the outer server is served.

    Threads: a stream holds one for as long as it lasts, so those of control streams follow from
    the run's `max_learners`, and there is one for a push of each; the others bound how many
    transfers are under way at once.
    """

    address: str = Field(
        default="127.0.0.1:7700", description="HOST:PORT of control, status and health"
    )
    bulk_port: int = Field(default=7701, ge=0, le=65535, description="port of pushes and pulls")
    advertise: str = Field(
        default="", description="host told to learners for bulk; empty: as dialled"
    )
    advertise_port: int = Field(
        default=0, ge=0, le=65535, description="port told to learners for bulk; 0: as bound"
    )
    cap_receive_mbit: CapMbit = Field(
        default=None,
        description="most Mbit/s of pushes that this server receives from all learners together",
    )
    cap_send_mbit: CapMbit = Field(
        default=None,
        description="most Mbit/s of weights that this server sends to all learners together",
    )
    admin_from: Literal["loopback", "anywhere", "nowhere"] = Field(
        default="loopback",
        description="from where `diloco admin` is taken: this machine, anywhere that reaches the"
        " server, or nowhere",
    )
    insecure: bool = Field(default=False, description="serve beyond loopback without certificates")
    push_threads: int = Field(
        default=8, ge=1, le=256, description="pushes received at once, at least"
    )
    pull_threads: int = Field(default=32, ge=1, le=256, description="pulls sent at once")
    watch_threads: int = Field(default=16, ge=1, le=256, description="status watchers at once")
    queued_calls: int = Field(
        default=256, ge=1, description="calls that may wait for a thread, a kind"
    )
    queued_notes: int = Field(
        default=1024, ge=16, description="notes queued for one control stream"
    )
    chunk_bytes: int = Field(
        default=CHUNK_BYTES,
        ge=1,
        le=MESSAGE_BYTES // 2,
        description="bytes of a payload in a message",
    )
    partial_bytes: int = Field(
        default=2 << 30, ge=1, description="bytes of pushes not yet complete"
    )
    partial_age_s: float = Field(default=300.0, gt=0, description="a broken push is kept this long")
    attach_s: float = Field(
        default=3.0, gt=0, description="a control stream must begin within this"
    )
    idle_s: float = Field(
        default=30.0, gt=0, description="a push or pull that moves nothing for so long is ended"
    )
    pulse_s: float = Field(default=0.5, gt=0, description="how often health looks at the run")


class ClientSettings(_Settings):
    """How patient a learner's link is. A bulk deadline is

        call_s + deadline_factor * bytes / (measured bytes a second, at most the learner's cap),

    and never less than the server's caps need; so the one knob for links that vary is
    `deadline_factor`.
    """

    call_s: float = Field(default=10.0, gt=0, description="deadline of a small call, seconds")
    deadline_factor: float = Field(default=4.0, ge=1, description="patience with a transfer")
    first_rate_bytes_s: float = Field(
        default=1e6, gt=0, description="assumed before any was measured"
    )
    tries: int = Field(default=6, ge=1, description="tries of a call that makes no progress")
    retry_wait_s: float = Field(default=0.2, gt=0, description="first wait between tries, jittered")
    retry_wait_max_s: float = Field(default=5.0, gt=0, description="longest wait between tries")
    chunk_bytes: int = Field(
        default=CHUNK_BYTES,
        ge=1,
        le=MESSAGE_BYTES // 2,
        description="bytes of a payload in a message",
    )
    payload_limit_bytes: int = Field(default=8 << 30, ge=1, description="largest payload taken")
    queued_messages: int = Field(
        default=1024, ge=16, description="messages queued on a control stream"
    )
