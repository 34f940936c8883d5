from __future__ import annotations

import grpc
import pytest

import fragments.errors
from diloco.v1 import control_pb2, control_pb2_grpc, status_pb2, status_pb2_grpc
from fragments.errors import (
    BusyError,
    DilocoError,
    LayoutError,
    NonFiniteError,
    PayloadError,
    RefusedError,
    RunDirectoryError,
    SettingsError,
    UnreachableError,
)
from fragments.records import RefusalCode
from services.client.status import fetch_status
from services.errors import ERRORS, REFUSALS, error_of, status_of
from tests.services.conftest import Site


def test_the_catalogue_is_complete() -> None:
    kinds = {
        kind
        for kind in vars(fragments.errors).values()
        if isinstance(kind, type) and issubclass(kind, DilocoError)
    }
    assert kinds - {RefusedError} <= set(ERRORS)
    assert set(REFUSALS) == set(RefusalCode)
    statuses = [*REFUSALS.values(), *(entry.status for entry in ERRORS.values())]
    # These two are what gRPC itself says of servers that are broken or of another make.
    assert not {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED} & set(statuses)


@pytest.mark.parametrize("code", RefusalCode)
def test_a_refusal_arrives_as_it_was_raised(site: Site, code: RefusalCode) -> None:
    site.outer.failure = RefusedError(code, f"not taken: {code}")
    with pytest.raises(RefusedError, match=f"not taken: {code}") as caught:
        fetch_status(site.address)
    assert caught.value.code is code
    assert _grpc_error(site).code() is REFUSALS[code]


@pytest.mark.parametrize(
    "kind", [LayoutError, PayloadError, NonFiniteError, SettingsError, BusyError, UnreachableError]
)
def test_a_public_error_arrives_as_it_was_raised(site: Site, kind: type[DilocoError]) -> None:
    site.outer.failure = kind("a sentence, with ümlauts")
    with pytest.raises(kind, match="a sentence, with ümlauts"):
        fetch_status(site.address)
    assert _grpc_error(site).code() is ERRORS[kind].status


@pytest.mark.parametrize(
    "failure", [RuntimeError("secret /srv/run"), RunDirectoryError("secret /srv/run is full")]
)
def test_what_is_private_becomes_an_incident(site: Site, failure: Exception) -> None:
    site.outer.failure = failure
    error = _grpc_error(site)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "incident" in (error.details() or "")
    told = f"{error.details()}{error.trailing_metadata()}"
    assert "secret" not in told
    assert "srv" not in told
    with pytest.raises(DilocoError, match=r"incident [0-9a-f]{8}"):
        fetch_status(site.address)


def test_an_error_of_a_new_kind_counts_as_its_ancestor() -> None:
    class TruncatedError(PayloadError):
        pass

    assert status_of(TruncatedError("cut")).code == grpc.StatusCode.DATA_LOSS.value[0]


def test_a_server_that_does_not_know_the_call_is_called_old(site: Site) -> None:
    # The bulk server has no status service.
    with pytest.raises(RefusedError, match="update the older") as caught:
        fetch_status(site.bulk_address)
    assert caught.value.code is RefusalCode.MISMATCH


def test_another_protocol_is_refused_with_what_to_do(site: Site) -> None:
    with grpc.insecure_channel(site.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeRun(control_pb2.DescribeRunRequest(protocol_version=99), timeout=5)
        error = error_of(caught.value, site.address, "describing")
        assert isinstance(error, RefusedError)
        assert error.code is RefusalCode.MISMATCH
        assert "update the older" in str(error)
        assert stub.DescribeRun(control_pb2.DescribeRunRequest(), timeout=5).run_id == "run-1"


def _grpc_error(site: Site) -> grpc.Call:
    """The failed call itself, as any generic client sees it."""
    with grpc.insecure_channel(site.address) as channel:
        call = status_pb2_grpc.StatusServiceStub(channel).GetStatus.future(
            status_pb2.GetStatusRequest(), timeout=5
        )
        assert call.exception() is not None
        return call


def test_a_server_that_is_not_there_is_told_of_without_the_words_of_grpc() -> None:
    with pytest.raises(
        UnreachableError, match=r"cannot be reached \(connection refused\)"
    ) as caught:
        fetch_status("127.0.0.1:1")
    assert "ipv4" not in str(caught.value)
