"""The environment of a process: what jax must find there, and what a child gets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, MutableMapping

# CPU thread pools of several jax processes on few cores fight each other, so that each process
# makes fewer steps than it would with one thread. XLA's own pool is left as it is: its flag
# --xla_cpu_multi_thread_eigen changes nothing any more, and NPROC=1, which gives it one thread, has
# let learners hang that use jax from several threads.
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NO_FUSED_MULTIPLY_ADD = "--xla_cpu_max_isa"
LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""What the allocator maps has large pages, which cost the kernel a tenth of the faults; see
`harness.memory`. In GLIBC_TUNABLES, which glibc reads when a process begins."""


def use_few_threads(environ: MutableMapping[str, str]) -> None:
    """One computing thread; what the environment already says is kept.

    Raises:
        RuntimeError: when this is the process's own environment and jax has read it already.
    """
    _check_unread(environ)
    for pool in _POOLS:
        environ.setdefault(pool, "1")


def few_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy with `use_few_threads`, and the allocator's setting, for a process elsewhere."""
    found = {"GLIBC_TUNABLES": LARGE_PAGES, **environ}
    use_few_threads(found)
    return found


def use_server_arithmetic(environ: MutableMapping[str, str]) -> None:
    """The processor, one computing thread, and an outer step of separate multiplications and
    additions.

    An accelerator that may be there belongs to a learner.

    With fused multiply-add, which XLA uses on x86 from AVX2 on, a Nesterov step differs from the
    same formula in numpy in the last bit of about a third of its elements; with AVX it is equal.
    The step is bound by memory, so it costs nothing. Only x86-64 has such a switch. (The built-in
    outer step is a loop of our own, which has the same bits everywhere; this is for an optimizer
    of the user's and for what else the server computes.)

    Raises:
        RuntimeError: when this is the process's own environment and jax has read it already.
    """
    use_few_threads(environ)
    environ["JAX_PLATFORMS"] = "cpu"
    given = environ.get("XLA_FLAGS", "").split()
    is_set = any(word.partition("=")[0] == _NO_FUSED_MULTIPLY_ADD for word in given)
    if platform.machine().lower() in ("x86_64", "amd64") and not is_set:
        # First, for XLA reads no further than to a word that is no flag.
        environ["XLA_FLAGS"] = " ".join([f"{_NO_FUSED_MULTIPLY_ADD}=AVX", *given])


def _check_unread(environ: MutableMapping[str, str]) -> None:
    if environ is os.environ and "jax" in sys.modules:
        raise RuntimeError("jax is already imported: it has read its environment")


def child_environment(*, every_core: bool = False) -> dict[str, str]:
    """A copy of this process's environment for a child that runs the same command.

    Settings of ours (DILOCO_...) stay out: a child gets its settings as flags, and one that was
    meant for the parent could be an error for the child. The import path is handed on, so that a
    child finds the same code whether it is installed or not. It computes with one thread, unless
    it has the machine to itself (`every_core`).
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environ["PYTHONUNBUFFERED"] = "1"
    environ.setdefault("GLIBC_TUNABLES", LARGE_PAGES)
    if not every_core:
        use_few_threads(environ)
    return environ


def command(*words: str) -> tuple[str, ...]:
    """The argument vector of `diloco <words>` under this interpreter."""
    return module("cli", *words)


def module(name: str, *words: str) -> tuple[str, ...]:
    """The argument vector of `python -m <name> <words>` under this interpreter.

    `-P` keeps the working directory off the import path, where a user's own `learner.py` would
    win over ours.
    """
    return (sys.executable, "-P", "-m", name, *words)
