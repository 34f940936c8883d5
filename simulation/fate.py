"""What befalls the learners of a world, brought about when its moment comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulation.clock import Order, VirtualClock
from simulation.learner import SimulatedLearner
from simulation.world import Befalls, Moment, World


class Fate:
    """Starts every learner, and does to it what the world says.

    Args:
        clock: the run's.
        world: what befalls whom.
        learners: by number.
        where: the run's (global step, share of the budget trained) now.
    """

    def __init__(
        self,
        clock: VirtualClock,
        world: World,
        learners: Sequence[SimulatedLearner],
        where: Callable[[], tuple[int, float]],
    ) -> None:
        self._clock = clock
        self._learners = learners
        self._where = where
        self._pending: list[tuple[Moment, Callable[[], None]]] = []
        self.joined_at_s: dict[int, float] = {}
        late = {event.learner for event in world.befalls if event.kind == "join"}
        for index in range(world.learners):
            if index not in late:
                self._join(index)
        for event in world.befalls:
            self._await(event.at, self._begin_of(event))

    def look(self) -> None:
        """Bring about what is due; called after everything that may have moved the run on."""
        step, share = self._where()
        due = [e for e in self._pending if e[0].reached(self._clock.now_s, step, share)]
        if due:
            self._pending = [entry for entry in self._pending if entry not in due]
            for _, action in due:
                self._clock.at(self._clock.now_s, Order.TIMER, action)

    def _await(self, moment: Moment, action: Callable[[], None]) -> None:
        if moment.s is not None:
            self._clock.at(moment.s, Order.TIMER, action)
        else:
            self._pending.append((moment, action))

    def _join(self, index: int) -> None:
        self.joined_at_s[index] = self._clock.now_s
        self._learners[index].start()

    def _begin_of(self, event: Befalls) -> Callable[[], None]:
        learner = self._learners[event.learner]

        def begin() -> None:
            match event.kind:
                case "join":
                    self._join(event.learner)
                case "death":
                    learner.die(event.returns)
                case "partition":
                    learner.cut()
                case "stall":
                    learner.stall()
            if event.until is not None:
                self._await(event.until, self._end_of(event))
                self.look()

        return begin

    def _end_of(self, event: Befalls) -> Callable[[], None]:
        learner = self._learners[event.learner]

        def end() -> None:
            match event.kind:
                case "death":
                    learner.start(event.returns)
                case "partition":
                    learner.heal()
                case "stall":
                    learner.resume()
                case "join":
                    raise AssertionError("a join has no end")

        return end
