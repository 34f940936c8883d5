"""The processes of one run on this machine: init, server, learners, evaluator."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fragments.errors import DilocoError
from fragments.runspec import RunSpec
from harness.environment import command, module
from harness.ground import Terms
from harness.plan import EVALUATOR, SERVER, Island
from harness.processes import Command, Supervisor
from harness.toml import to_toml
from harness.warm import request, use_cache

TICK_S = 0.1
START_LIMIT_S = 60.0
COMPILER = "compiler"
INIT = "init"


class StoppedError(Exception):
    """The person who started the run has stopped it."""


@dataclass(frozen=True, slots=True)
class Look:
    """Watches processes while something is waited for. `stop` ends every wait."""

    processes: Supervisor
    stop: threading.Event
    logs: Path
    at_tick: Callable[[], None] = lambda: None

    def until(self, is_over: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until `is_over()`, asked ten times a second.

        Raises:
            StoppedError: when `stop` is set meanwhile.
            DilocoError: after `limit_s`; `what` names what took too long.
        """
        deadline_s = self.processes.now_s + limit_s
        while True:
            self.processes.poll()
            over = is_over()
            self.at_tick()
            if over:
                return
            if self.processes.now_s > deadline_s:
                raise DilocoError(
                    f"{what} took longer than {limit_s:g} s and was ended;"
                    f" the logs are in {self.logs}"
                )
            if self.stop.wait(TICK_S):
                raise StoppedError


@dataclass(slots=True)
class Cluster:
    """Starts the processes of a run in `out` and waits on them. `stop` ends every wait.

    `out` gets the run directory (`run`), the settings that it was made with (`init.toml`) and the
    processes' logs. The supervisor owns the processes; whoever made it ends them.
    """

    out: Path
    spec: RunSpec
    data: str | None
    stop: threading.Event
    processes: Supervisor
    max_restarts: int = 0
    address: str = ""
    bulk_port: int = 0
    at_tick: Callable[[], None] = lambda: None
    """Called at every tick of every wait."""
    entry: Callable[[str], tuple[str, ...]] = lambda _name: command()
    """What `diloco` is to the process of that name: the words before those of its verb."""
    serve_flags: tuple[str, ...] = ()
    """What else `diloco serve` is told."""
    learn_flags: Callable[[str], tuple[str, ...]] = lambda _name: ()
    """What else the learner of that name is told."""
    dialled: Callable[[str, str], str] = lambda _name, address: address
    """What the learner of that name dials, given the server's address."""
    terms: Terms = field(default_factory=Terms)
    """Where the processes are; a server that is started again must have ports of its own, so as to
    be found again."""
    server_restarts: int = 0
    """How often the server is started again when it dies."""
    start_limit_s: float = START_LIMIT_S
    """Longest wait for a process that makes, compiles or loads the run."""
    checkpoint_every_s: float | None = None
    """Between two checkpoints of a learner, in `out/checkpoints`; None for none."""
    _compiles: bool = False
    _environ: dict[str, str] = field(init=False)
    _cached: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._environ, self._cached = self.terms.environ(False), self.terms.environ(False)
        use_cache(self._cached, self.out / "cache")

    @property
    def run_dir(self) -> Path:
        """Where the server's state is."""
        return self.out / "run"

    def log(self, name: str) -> Path:
        """Where the process `name` writes."""
        return self.out / "logs" / f"{name}.log"

    def make_run(self) -> None:
        """`diloco init`, to its end.

        Raises:
            DilocoError: when it fails, with its own last words.
        """
        given = self.spec.model_dump(mode="json", exclude_unset=True)
        self._settings.write_text(to_toml({"init": given}), encoding="utf-8")
        self.processes.start(self._init_command())
        self.until(lambda: self.processes.settled(INIT), self.start_limit_s, INIT)
        if self.processes.exit_code(INIT) != 0:
            self.processes.require_alive(INIT)

    def start_compiling(self) -> None:
        """Begins to compile what learners and evaluator need; `serve` then waits for it."""
        self._compiles = True
        self.processes.start(self._compiler_command())

    def serve(self) -> str:
        """Starts the server on its ports and returns its address once it listens.

        Raises:
            DilocoError: when it ends instead, with its own last words.
        """
        self.processes.start(self._serve_command())
        place = self.run_dir / "address.json"

        def is_up() -> bool:
            self.processes.require_alive(SERVER)
            return place.exists()

        self.until(is_up, self.start_limit_s, "the server's start")
        if self._compiles:
            self.until(lambda: self.processes.settled(COMPILER), self.start_limit_s, "compiling")
            if self.processes.exit_code(COMPILER) != 0:
                self.processes.require_alive(COMPILER)
        told = json.loads(place.read_text(encoding="utf-8"))
        self.address = self.terms.reached_at or str(told["address"])
        self.bulk_port = int(told["bulk_port"])
        return self.address

    def learn(self, island: Island) -> None:
        """Starts a learner; it is started again when it dies, `max_restarts` times."""
        self.processes.start(self._learn_command(island))

    def evaluate(self, every_s: float) -> None:
        """Starts the evaluator; it is started again when it dies, `max_restarts` times."""
        self.processes.start(self._evaluate_command(every_s))

    def commands(
        self, islands: Sequence[Island], evaluate_every_s: float | None = None
    ) -> tuple[Command, ...]:
        """Of all processes of a run with these learners, where addresses are known beforehand."""
        found = [self._init_command(), self._compiler_command(), self._serve_command()]
        found += [self._learn_command(island) for island in islands]
        if evaluate_every_s is not None:
            found.append(self._evaluate_command(evaluate_every_s))
        return tuple(found)

    def until(self, is_over: Callable[[], bool], limit_s: float, what: str) -> None:
        """`Look.until`, of this run's processes."""
        look = Look(self.processes, self.stop, self.out / "logs", self.at_tick)
        look.until(is_over, limit_s, what)

    @property
    def _settings(self) -> Path:
        return self.out / "init.toml"

    def _init_command(self) -> Command:
        words = ("init", str(self.run_dir), "--config", str(self._settings))
        return self._command(INIT, *words, *self._data_flags())

    def _compiler_command(self) -> Command:
        argv = module("harness.warm", request(self.spec, self.data))
        return Command(COMPILER, argv, self.log(COMPILER), self._cached)

    def _serve_command(self) -> Command:
        control, bulk = self.terms.server_ports
        words = ("--address", f"{self.terms.server_host}:{control}", "--bulk-port", str(bulk))
        flags = (*self.terms.serve_flags, *self.serve_flags, *self._tie)
        restarts = self.server_restarts
        return self._command(SERVER, "serve", str(self.run_dir), *words, *flags, restarts=restarts)

    def _learn_command(self, island: Island) -> Command:
        return self._command(
            island.name,
            *("learn", "--address", self.dialled(island.name, self.address)),
            *("--name", island.name),
            *("--pace-s", repr(island.pace_s), *self._tie),
            *self.learn_flags(island.name),
            *self._checkpoint_flags(island.name),
            *self._data_flags(),
            restarts=self.max_restarts,
        )

    def _evaluate_command(self, every_s: float) -> Command:
        return self._command(
            EVALUATOR,
            *("evaluate", "--address", self.dialled(EVALUATOR, self.address)),
            *("--name", EVALUATOR, "--every-s", repr(every_s), *self._tie),
            *self._data_flags(),
            restarts=self.max_restarts,
        )

    def _command(self, name: str, *words: str, restarts: int = 0) -> Command:
        argv = (*self.entry(name), *words, "--log-format", "json")
        # The server's arithmetic is its own (environment.use_server_arithmetic): it shares nothing.
        is_server = name == SERVER
        environ = self._environ if is_server else self._cached
        return Command(name, argv, self.log(name), environ, restarts, outlives=is_server)

    @property
    def _tie(self) -> tuple[str, ...]:
        return ("--exit-with-parent",) if self.terms.is_tied else ()

    def _checkpoint_flags(self, name: str) -> tuple[str, ...]:
        if self.checkpoint_every_s is None:
            return ()
        directory = self.out / "checkpoints" / name
        every_s = repr(self.checkpoint_every_s)
        return ("--checkpoint-dir", str(directory), "--checkpoint-every-s", every_s)

    def _data_flags(self) -> tuple[str, ...]:
        return ("--data", self.data) if self.data is not None else ()
