"""Structured logs to stderr, for every verb alike."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from cli.keys import VerbSettings


class _Stderr:
    """Writes lines to whatever stderr is now; a stderr that is gone loses lines and nothing else.

    Logging happens on the threads that own a run's state: they must not die of a closed pipe.
    """

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # a broken pipe; a closed file
            return

    log = debug = info = warning = error = critical = exception = msg


def configure_logs(settings: VerbSettings, **bound: str) -> None:
    """Sends structlog's events to stderr as JSON lines or as text; `bound` is on every line.

    Other libraries' warnings come through the standard library's logging, to stderr too.
    """
    level = getattr(logging, settings.log_level.upper())
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING))
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        stamp,
    ]
    if settings.log_format == "json":
        tail: list[Any] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=True),
        ]
    else:
        tail = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=shared + tail,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_args: _Stderr(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
