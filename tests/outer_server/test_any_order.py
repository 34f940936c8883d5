"""Every order of events, by property."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragments.records import (
    ContributionKey,
    Decline,
    DeclineReason,
    HeldBase,
    Receipt,
    Report,
    Version,
    Welcome,
)
from outer_server.core.events import (
    Declined,
    Drain,
    Leave,
    Reply,
    Reported,
    Tick,
)
from outer_server.core.resume import resume
from tests.support.scheduled import Run


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: nothing counts twice, nothing accepted is lost.

    Three names, each with two processes that may live on unheard and come back, want two or three
    places. Each process counts its own steps, as learners do.
    """

    @initialize(
        places=st.sampled_from([2, 2, 3]),
        quorum=st.integers(1, 3),
        min_learners=st.integers(1, 2),
        budget_tokens=st.sampled_from([10**6, 10**6, 320]),
        late=st.sampled_from(["join", "join", "drop"]),
        staleness_bound=st.sampled_from([0, 1, 4]),
    )
    def begin(self, places: int, quorum: int, **spec: object) -> None:
        self.run = Run(max_learners=places, quorum=min(places, quorum), **spec)
        self.accepted: set[ContributionKey] = set()
        self.num_merged = 0
        self.trained: Counter[tuple[str, str]] = Counter()
        self.pushed: dict[tuple[str, str], list[tuple[int, int, int, str]]] = {}
        self.process = dict.fromkeys("abc", "1")
        self.last_step = 0
        for name in "abc":
            if isinstance(self.run.join(name), Welcome):
                for fragment in range(2):
                    self.run.adopt(name, fragment)

    names = st.sampled_from("abc")
    some = st.sets(names)

    @rule(silent=some, merging=st.booleans(), lagging=some)
    def everybody_goes_on(self, silent: set[str], merging: bool, lagging: set[str]) -> None:
        """Two steps of all, answers and adoption but for some, and the merges or not yet."""
        for name in "abc":
            self.step(name, 2)
        self.answer(silent)
        while self.run.orders and merging:
            self.merge(None)
        for name in sorted(set("abc") - lagging):
            for fragment in range(2):
                self.adopt(name, fragment)

    @rule(silent=some)
    def answer(self, silent: set[str]) -> None:
        """What learners do: answer the open asks on the base that they hold."""
        for fragment in range(2):
            for name in sorted(self.run.state.learners.keys() - silent):
                round_ = self.run.state.fragments[fragment].round
                held = self.run.state.learners[name].bases[fragment].version
                if round_ is not None and name in round_.asked and held >= 0:
                    self.push(name, fragment, held, round_.version, "x")

    @rule(name=names, incarnation=st.sampled_from("12"), behind=st.integers(0, 2))
    def join(self, name: str, incarnation: str, behind: int) -> None:
        """A process comes, or comes back: with what it holds, where it is, and all it ever sent."""
        steps = self.trained[name, incarnation]
        held = []
        for fragment, at in enumerate(self.run.state.fragments):
            version = Version(self.run.state.epoch, max(0, at.version - behind))
            held.append(HeldBase(fragment, version, min(2, steps), 16 * min(2, steps)))
        bases = tuple(held) if steps else ()
        welcome = self.run.join(name, incarnation, bases=bases, cursor=steps)
        if isinstance(welcome, Welcome):
            self.process[name] = incarnation
            self.step(name, 0)
            for push in self.pushed.get((name, incarnation), []):
                self.take(self.run.contribute(name, *push))

    @rule(gone=names, name=names, incarnation=st.sampled_from("12"), behind=st.integers(0, 2))
    def take_the_place(self, gone: str, name: str, incarnation: str, behind: int) -> None:
        """One leaves and another joins: in a full run, in the place of the name gone longest."""
        self.run.tell(Leave(gone, self.run.token(gone), "test"))
        self.join(name, incarnation, behind)

    @rule(name=names, steps=st.integers(1, 5))
    def step(self, name: str, steps: int) -> None:
        who = name, self.process[name]
        self.trained[who] += steps
        at = self.trained[who]
        self.run.tell(Reported(name, self.run.token(name), Report(at, 16 * at, at)))

    @rule(name=names, fragment=st.integers(0, 1))
    def adopt(self, name: str, fragment: int) -> None:
        if name in self.run.state.learners:
            self.run.adopt(name, fragment)

    @rule(
        name=names, fragment=st.integers(0, 1), behind=st.integers(0, 2), text=st.sampled_from("xy")
    )
    def contribute(self, name: str, fragment: int, behind: int, text: str) -> None:
        version = self.run.state.fragments[fragment].version
        base = max(0, version - behind)
        self.push(name, fragment, base, version, text)

    def push(self, name: str, fragment: int, base: int, asked: int, text: str) -> None:
        """Kept by the process, which may not have heard the answer when it has to join again."""
        kept = self.pushed.setdefault((name, self.process[name]), [])
        kept.append((fragment, base, asked, text))
        self.take(self.run.contribute(name, fragment, base, asked, text))

    def take(self, reply: Reply) -> None:
        """A repeated one hears of the first; what was refused once is never said to be here."""
        if isinstance(reply, Receipt):
            assert (reply.key in self.accepted) == reply.duplicate
            self.accepted.add(reply.key)

    @rule(name=names, fragment=st.integers(0, 1))
    def decline(self, name: str, fragment: int) -> None:
        version = Version(self.run.state.epoch, self.run.state.fragments[fragment].version)
        decline = Decline(fragment, version, DeclineReason.NO_STEPS)
        self.run.tell(Declined(name, self.run.token(name), decline))

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.run.now_s += seconds
        self.run.tell(Tick())

    @precondition(lambda self: self.run.orders)
    @rule(refused=st.sampled_from([None, None, "not finite"]))
    def merge(self, refused: str | None) -> None:
        order = self.run.orders[0]
        bases = [meta.key.base_version.number for meta in order.contributions]
        assert order.version in bases, "what was carried over closed a round"
        self.num_merged += len(bases) if refused is None else 0
        self.run.finish_merge(refused)

    @rule(drained=st.booleans(), silent=some)
    def restart(self, drained: bool, silent: set[str]) -> None:
        """The server is killed; or it drains, parks what still comes, and goes on later."""
        if drained:
            self.run.tell(Drain("test"))
            merging = len(self.run.orders)
            self.answer(silent)
            assert len(self.run.orders) == merging, "a round closed while draining"
        self.run.orders.clear()
        self.run.state = resume(self.run.state, self.run.state.generation + 1, epoch=1)
        self.run.now_s = 0.0

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "run"):
            return
        waiting = [m.key for f in self.run.state.fragments for m in f.arrived]
        merging = [m.key for order in self.run.orders for m in order.contributions]
        here = Counter([*waiting, *merging, *self.run.discarded])
        assert set(here) == self.accepted
        assert max(here.values(), default=1) == 1
        assert self.run.state.tokens_pushed == 32 * len(self.accepted)
        assert self.run.state.tokens_merged == 32 * self.num_merged

    @invariant()
    def no_step_counts_twice(self) -> None:
        if hasattr(self, "run"):
            assert self.run.state.tokens_trained <= 16 * self.trained.total()

    @invariant()
    def the_clock_never_falls(self) -> None:
        if not hasattr(self, "run"):
            return
        assert self.run.state.global_step >= self.last_step
        self.last_step = self.run.state.global_step


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
