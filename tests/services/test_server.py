"""What one server must keep apart, and how it starts and stops."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diloco.v1 import (
    control_pb2,
    control_pb2_grpc,
    push_pb2,
    push_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from fragments.errors import BusyError, SettingsError
from fragments.records import Phase
from services import translate
from services.client.channel import CHANNEL_OPTIONS
from services.client.status import fetch_status, watch_status
from services.errors import error_of
from services.health import AdminHealth
from services.listen import SERVER_OPTIONS
from services.outer.server import OuterServices
from services.settings import ServerSettings
from tests.services.conftest import Serve, Site
from tests.services.fake import DIGEST, RUN_ID, FakeOuter, contribution, hello

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        # Types of the health and reflection stubs are not complete.
        check: Any = health_pb2_grpc.HealthStub(channel)
        return int(check.Check(request, timeout=2).status)


def test_full_data_pools_starve_neither_health_nor_status_nor_control(serve: Serve) -> None:
    site = serve(push_threads=2, pull_threads=2)
    link = site.link()
    lease = link.join(hello()).lease
    hold = threading.Event()
    header = translate.contribution_to_wire(contribution(b"x" * 100), lease, RUN_ID, DIGEST, 0)

    def stuck() -> Iterator[push_pb2.PushRequest]:
        yield push_pb2.PushRequest(header=header)
        hold.wait(10)

    with grpc.insecure_channel(site.bulk_address) as channel:
        stub = push_pb2_grpc.PushServiceStub(channel)
        calls = [stub.Push.future(stuck(), timeout=10) for _ in range(6)]
        site.outer.wait(lambda: site.outer.up.get("eu", 0) > header.ByteSize())
        assert health(site.bulk_address, "diloco.v1.PushService") == SERVING
        assert health(site.address) == SERVING
        assert fetch_status(site.address, timeout_s=2).run_id == RUN_ID
        assert link.pull(lease, 0, None) == ()
        offset = push_pb2.GetPushOffsetRequest(lease=header.lease, key=header.key)
        assert stub.GetPushOffset(offset, timeout=2).offset == 0
        link.join(hello("us"))
        hold.set()
        for call in calls:
            assert call.exception(timeout=10) is not None  # each ended before its last chunk


def test_many_control_streams_and_watchers_leave_room_for_calls(serve: Serve) -> None:
    site = serve(FakeOuter(max_learners=12))
    link = site.link()
    for i in range(12):
        lease = link.join(hello(f"l{i}")).lease
        link.open_control(lease, lambda note: None, lambda: None)
    site.outer.wait(lambda: all(site.outer.is_attached(f"l{i}") for i in range(12)))
    watchers = [watch_status(site.address, 0.1) for _ in range(10)]
    for watcher in watchers:
        assert next(watcher).run_id == RUN_ID
    assert health(site.address) == SERVING
    assert link.join(hello("l0")).lease.token == 2
    assert fetch_status(site.address, timeout_s=2).generation == 1
    for watcher in watchers:
        watcher.close()  # type: ignore[attr-defined]


def test_one_watcher_too_many_is_told_so_at_once(serve: Serve) -> None:
    site = serve(watch_threads=1)
    first = watch_status(site.address, 0.1)
    next(first)
    with pytest.raises(BusyError, match="1 watch calls in hand"):
        next(watch_status(site.address, 0.1))
    assert fetch_status(site.address).run_id == RUN_ID
    next(first)


def test_a_stopped_server_ends_its_watchers(site: Site) -> None:
    watcher = watch_status(site.address, 60)
    next(watcher)
    site.services.stop(grace_s=5)
    assert list(watcher) == []


def test_watching_sees_changes(site: Site) -> None:
    watcher = watch_status(site.address, 0.1)
    assert next(watcher).phase is Phase.TRAINING
    site.outer.phase = Phase.FINISHED
    assert any(
        status.phase is Phase.FINISHED for status, _ in zip(watcher, range(50), strict=False)
    )


def test_an_interval_that_is_no_number_is_refused(site: Site) -> None:
    with pytest.raises(SettingsError, match="interval_s is nan"):
        next(watch_status(site.address, float("nan")))


def test_health_is_that_of_the_run(site: Site) -> None:
    names = {
        site.address: ("", "diloco.v1.ControlService", "diloco.v1.StatusService"),
        site.bulk_address: ("", "diloco.v1.PushService", "diloco.v1.PullService"),
    }
    changes = [_watch(address) for address in names]
    for seen in changes:
        while next(seen).status != SERVING:
            pass
    for address, services in names.items():
        assert [health(address, name) for name in services] == [SERVING] * 3
    site.outer.phase = Phase.DRAINING
    assert [next(seen).status for seen in changes] == [NOT_SERVING] * 2
    site.outer.phase = Phase.TRAINING
    assert [next(seen).status for seen in changes] == [SERVING] * 2
    site.outer.failure = RuntimeError("the engine is dead")
    assert [next(seen).status for seen in changes] == [NOT_SERVING] * 2
    with pytest.raises(grpc.RpcError):
        health(site.address, "diloco.v1.Unheard")


def _watch(address: str) -> Iterator[health_pb2.HealthCheckResponse]:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        stub: Any = health_pb2_grpc.HealthStub(channel)
        yield from stub.Watch(request, timeout=20)


def test_health_says_not_serving_while_a_stop_waits_for_calls(site: Site) -> None:
    seen = _watch(site.address)
    while next(seen).status != SERVING:
        pass
    stopping = threading.Thread(target=site.services.stop, args=(5,))
    stopping.start()
    assert next(seen).status == NOT_SERVING
    seen.close()  # type: ignore[attr-defined]
    stopping.join(10)
    assert not stopping.is_alive()


def test_two_servers_in_one_process_watch_their_own_health(serve: Serve) -> None:
    """grpc_health keeps the pool of Watch in its class, which the last servicer overwrites."""
    first, second = serve(), serve()
    second.services.stop(0)
    seen = _watch(first.address)
    while next(seen).status != SERVING:
        pass
    assert health(first.address) == SERVING


def test_health_changes_while_watchers_come_and_go() -> None:
    """A watcher that leaves while the state changes must not stop the whole server.

    With the non-blocking Watch of grpc_health it did: `set` waits for gRPC's one thread, which
    waits for the lock that `set` holds.
    """
    admin, over = AdminHealth(0), threading.Event()

    def flip() -> None:
        while not over.is_set():
            admin.serving = not admin.serving

    flipping = threading.Thread(target=flip, daemon=True)
    flipping.start()
    for _ in range(100):
        seen = _watch(str(admin.address))
        next(seen)
        seen.close()  # type: ignore[attr-defined]
    over.set()
    flipping.join(10)
    assert not flipping.is_alive()
    assert health(str(admin.address)) in (SERVING, NOT_SERVING)
    admin.stop()


def test_watchers_of_health_leave_room_for_checks(site: Site) -> None:
    watchers = [_watch(site.address) for _ in range(12)]
    for seen in watchers:
        while next(seen).status != SERVING:
            pass
    assert health(site.address) == SERVING
    for seen in watchers:
        seen.close()  # type: ignore[attr-defined]


def test_reflection_names_what_control_serves(site: Site) -> None:
    with grpc.insecure_channel(site.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "diloco.v1.ControlService",
        "diloco.v1.StatusService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize("used", ["control", "bulk"])
def test_a_used_port_is_one_sentence_and_the_other_stays_free(site: Site, used: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free: int = probe.getsockname()[1]
    taken = getattr(site.services.ports, used)
    control, bulk = (taken, free) if used == "control" else (free, taken)
    settings = ServerSettings(address=f"127.0.0.1:{control}", bulk_port=bulk)
    with pytest.raises(SettingsError, match=f":{taken} is in use.*choose another port"):
        OuterServices(FakeOuter(), settings).start()
    assert fetch_status(site.address).run_id == RUN_ID
    with socket.create_server(("127.0.0.1", free)):
        pass


def test_an_address_of_another_machine_cannot_be_served() -> None:
    settings = ServerSettings(address="192.0.2.1:0", bulk_port=0, insecure=True)
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign"):
        OuterServices(FakeOuter(), settings).start()


def test_beyond_loopback_takes_insecure() -> None:
    with pytest.raises(SettingsError, match="--insecure"):
        OuterServices(FakeOuter(), ServerSettings(address="0.0.0.0:0"))


def test_stopping_twice_frees_both_ports(site: Site) -> None:
    site.services.stop(0)
    site.services.stop(0)
    for port in site.services.ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_keepalive_of_both_sides_agree() -> None:
    """A client that pings more often than the server allows gets GOAWAY too_many_pings."""
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > 2 * allowed_ms
    assert server["grpc.keepalive_permit_without_calls"] == 1
    for options in (client, server):
        assert options["grpc.max_receive_message_length"] == 4 << 20
        assert options["grpc.keepalive_timeout_ms"] == 10_000
    assert client["grpc.enable_http_proxy"] == 0


def test_a_proxy_of_the_environment_is_not_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch_status(site.address).run_id == RUN_ID


def test_a_message_above_the_limit_is_refused_by_control(site: Site) -> None:
    options = [("grpc.max_send_message_length", -1)]
    request = control_pb2.JoinRequest(name="x" * (5 << 20))
    with grpc.insecure_channel(site.address, options=options) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            control_pb2_grpc.ControlServiceStub(channel).Join(request, timeout=5)
        assert isinstance(error_of(caught.value, site.address, "joining"), BusyError)


def test_an_unknown_method_is_unimplemented(site: Site) -> None:
    with grpc.insecure_channel(site.address) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/diloco.v1.ControlService/Format"
        )
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            call(b"", timeout=5)


def test_admin_health_says_what_its_process_says() -> None:
    admin = AdminHealth(0)
    address = str(admin.address)
    assert address.startswith("127.0.0.1:")
    assert health(address) == NOT_SERVING
    admin.serving = True
    assert health(address) == SERVING
    with pytest.raises(SettingsError, match="is in use"):
        AdminHealth(admin.port)
    admin.stop()
    admin.stop()
    with socket.create_server(("127.0.0.1", admin.port)):
        pass


def test_status_answers_while_the_server_is_asked_by_many(serve: Serve) -> None:
    site = serve()
    with grpc.insecure_channel(site.address) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        calls = [
            stub.GetStatus.future(status_pb2.GetStatusRequest(), timeout=10) for _ in range(200)
        ]
        assert all(call.result().status.run_id == RUN_ID for call in calls)
