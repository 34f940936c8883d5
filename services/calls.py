"""Which thread runs a call, how many may wait for one, and what becomes of an error in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from fragments.errors import BusyError, PayloadError
from services.errors import end_call

if TYPE_CHECKING:  # generic in the types only
    Handler = grpc.RpcMethodHandler[Any, Any]
Behaviour = Callable[..., Any]


class CallPool(ThreadPoolExecutor):
    """Threads for one concern, so that none of them starves another.

    gRPC itself queues without bound. `full` says when `threads` calls run and `queued` wait; the
    interceptor then turns a call away, since only the one thread of its server submits here.
    """

    def __init__(self, name: str, threads: int, queued: int) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self.name = name
        self.room = threads + queued
        self._held = 0
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether the next call would be one too many."""
        with self._lock:
            return self._held >= self.room

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `ThreadPoolExecutor.submit`, counted until done."""
        future = super().submit(fn, *args, **kwargs)
        with self._lock:
            self._held += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._held -= 1


@dataclass(frozen=True)
class _Pooled:
    """A behaviour with the attributes by which gRPC picks its thread pool."""

    behaviour: Behaviour
    experimental_thread_pool: CallPool

    def __call__(self, *args: Any) -> Any:
        return self.behaviour(*args)


class CallPools:
    """All pools of one server.

    Args:
        pools: by method ("/package.Service/Method") or service ("/package.Service"); the method
            counts first. A method in neither is answered with UNIMPLEMENTED.
    """

    def __init__(self, pools: Mapping[str, CallPool]) -> None:
        self._pools = pools
        self._turn_away = CallPool("turn away", 1, 256)

    def server(self, options: Sequence[tuple[str, int]]) -> grpc.Server:
        """A server that runs its calls in these pools."""
        every = (*self._pools.values(), self._turn_away)
        return grpc.server(
            self._turn_away,
            interceptors=[_Interceptor(self._pools, self._turn_away)],
            options=options,
            # The sum of all room: met by a flood of calls only. What one pool has no room for is
            # told so with a sentence.
            maximum_concurrent_rpcs=sum(pool.room for pool in every),
        )

    def shutdown(self) -> None:
        """Lets the threads end; what still waits is dropped."""
        for pool in (*self._pools.values(), self._turn_away):
            pool.shutdown(wait=False, cancel_futures=True)


class _Interceptor(grpc.ServerInterceptor):
    """Gives each call its pool and each error its status."""

    def __init__(self, pools: Mapping[str, CallPool], turn_away: CallPool) -> None:
        self._pools = pools
        self._turn_away = turn_away

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Runs on the one thread of the server that accepts calls: it must not block."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        pool = self._pools.get(method) or self._pools.get(method.rpartition("/")[0])
        if handler is None or pool is None:
            return None
        behaviour = _behaviour(handler)
        if pool.full:
            behaviour, pool = _busy(pool), self._turn_away
        readable = _readable_stream if handler.request_streaming else _readable
        wrap = _translated_stream if handler.response_streaming else _translated
        return _rebuilt(handler, _Pooled(wrap(readable(behaviour)), pool))


def _busy(pool: CallPool) -> Behaviour:
    def behaviour(_request: Any, _context: grpc.ServicerContext) -> Any:
        raise BusyError(f"the server has {pool.room} {pool.name} calls in hand: try again later")

    return behaviour


class _Unreadable:
    """Takes the place of a message that cannot be read.

    What a deserializer raises, gRPC answers with INTERNAL; it keeps 20 KB of each such call for
    good (measured with 1.85), and to the call's handler the stream seems to end as it should.
    """


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Unreadable()

    return read


def _read(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise PayloadError("a message of this call cannot be read: it is damaged, or not of ours")
    return request


def _readable(behaviour: Behaviour) -> Behaviour:
    return lambda request, context: behaviour(_read(request), context)


def _readable_stream(behaviour: Behaviour) -> Behaviour:
    return lambda requests, context: behaviour(map(_read, requests), context)


def _translated(behaviour: Behaviour) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behaviour(request, context)
        except Exception as error:  # noqa: BLE001 (the border: all become a status)
            _end(context, error)

    return call


def _translated_stream(behaviour: Behaviour) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(request, context)
        except Exception as error:  # noqa: BLE001 (the border: all become a status)
            _end(context, error)

    return call


def _end(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, grpc.RpcError):  # the caller is gone, and gRPC knows
        raise error
    end_call(context, error)


def _behaviour(handler: Handler) -> Behaviour:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)


def _rebuilt(handler: Handler, behaviour: Behaviour) -> Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        behaviour,
        request_deserializer=_lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )
