"""The supervisor's Plan and the agents' AgentState, driven by random faults in a simulation without processes."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.cli import elastic_run
from mpistrat.elastic.agent import (
    COMMIT_LIMIT_S,
    HOST_LOST_AFTER_S,
    LOST_AFTER_S,
    STAY_S,
    AgentState,
    Connect,
    End,
    Kill,
    Tell,
)
from mpistrat.elastic.agent import Action as AgentAction
from mpistrat.elastic.commits import CommitId
from mpistrat.elastic.elastic_job import LEAVE_CODE
from mpistrat.elastic.supervisor_plan import PREEMPTED_CODE, Action, Done, Leave, Limits, Plan, Say, Start, Stop

STEP_S = 0.25
STEPS_OF_JOB = 300  # committed steps after which the ranks end


@dataclass
class SimulatedRank:
    host: str
    rank: int
    pid: int  # and its line to the agent
    generation: int
    must_leave: bool = False


@dataclass
class SimulatedHost:
    """A host with its agent. `link` is whether messages to and from the supervisor arrive."""

    name: str
    agent: AgentState | None = None
    is_up: bool = True
    link: bool = True
    heard: float = float("inf")  # by the supervisor; infinite: it has no line to the agent
    has_line: bool = False  # as the agent sees it
    unsent: list[dict] = field(default_factory=list)


@dataclass
class World:
    """An elastic job without processes: what the shells do, with a clock that the test moves."""

    limits: Limits
    hosts: dict[str, SimulatedHost]
    slots: int
    seed: int
    now: float = 0.0
    ranks: dict[int, SimulatedRank] = field(default_factory=dict)
    done: Done | None = None
    steps: int = 0
    commits: list[CommitId] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # the ranks of each generation
    mpirun: int | None = None
    started_at: float = 0.0
    next_pid: int = 1
    reached: int = 0  # on how many ranks' places the mpirun has started them

    def __post_init__(self) -> None:
        self.plan = Plan(self.limits, self.now)
        self.random = random.Random(self.seed)
        # The first host is there from the beginning, the others perhaps.
        self.listed = {name for name in self.hosts if name.endswith("0") or self.random.random() < 0.3}

    # -- the shells ------------------------------------------------------------------------------------------------

    def supervise(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert self.mpirun is None, "an mpirun runs already"
                assert self.limits.min_np <= action.ranks <= self.limits.max_np
                assert sum(slots for _, slots in action.hosts) == action.ranks
                self.mpirun, self.started_at = action.generation, self.now
                self.start(action)
            elif isinstance(action, Leave):
                for host in self.reachable():
                    self.keep(host, host.agent.leave(action.generation, action.why))
            elif isinstance(action, Stop):
                self.end_mpirun(kills=True)
            elif isinstance(action, Done):
                assert self.done is None
                self.done = action

    def reachable(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.is_up and host.link and host.agent is not None]

    def start(self, action: Start) -> None:
        self.sizes[action.generation] = action.ranks
        number = self.reached = 0
        for name, slots in action.hosts:
            host = self.hosts[name]
            for _ in range(slots):
                if host.is_up and host.link:
                    if host.agent is None:
                        host.agent, host.unsent = AgentState(self.now), []
                    if not host.has_line:
                        self.connect(host)
                    self.ranks[self.next_pid] = SimulatedRank(name, number, self.next_pid, action.generation)
                    self.keep(host, host.agent.hello(self.next_pid, number, self.next_pid, action.generation,
                                                      is_connected=True))
                    self.next_pid += 1
                    self.reached += 1
                number += 1

    def connect(self, host: SimulatedHost) -> None:
        host.has_line, host.heard, unsent, host.unsent = True, self.now, host.unsent, []
        self.plan.agent_found(host.name)
        for message in unsent:
            self.tell_supervisor(host.name, message)
        self.keep(host, host.agent.connected())
        self.keep(host, host.agent.beat(self.plan.generation, self.now, self.now))

    def keep(self, host: SimulatedHost, actions: list[AgentAction]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                self.die(action.pid)
            elif isinstance(action, End):
                host.agent = None
            elif isinstance(action, Connect):
                host.has_line = False
                if host.link and host.heard < float("inf"):
                    host.heard = float("inf")
                    self.supervise(self.plan.agent_gone(host.name, "its line is closed", self.now))
            elif action.to is None:
                if host.has_line:
                    if host.link and host.heard < float("inf"):
                        self.tell_supervisor(host.name, action.message)
                else:
                    host.unsent.append(action.message)
            elif action.message["kind"] == "leave" and action.to in self.ranks:
                self.ranks[action.to].must_leave = True
            elif action.message["kind"] == "there":
                self.keep(host, host.agent.written(action.to, 100, "", self.now))
            elif action.message["kind"] == "kept":
                assert host.agent.newest is not None
                self.commits.append(host.agent.newest.id)

    def tell_supervisor(self, host: str, message: dict) -> None:
        kind, pid, generation = message["kind"], message.get("pid"), message.get("generation")
        if kind == "hello":
            self.plan.hello(host, message["rank"], pid, generation, message["connected"])
        elif kind == "died":
            self.supervise(self.plan.died(host, pid, generation, self.now))
        elif kind == "ended":
            self.supervise(self.plan.ended(host, pid, generation, message["code"], message["why"], self.now))
        elif kind == "committed":
            self.plan.committed(CommitId(*message["commit"]), message["step"])

    def die(self, pid: int) -> None:
        rank = self.ranks.pop(pid, None)
        if rank is not None:
            host = self.hosts[rank.host]
            if host.agent is not None:
                self.keep(host, host.agent.closed(pid))

    def end_mpirun(self, kills: bool) -> None:
        """mpirun ends, and its ranks with it, where its daemons can be reached."""
        generation, self.mpirun = self.mpirun, None
        if generation is None:
            return
        for pid in [pid for pid, rank in self.ranks.items() if rank.generation == generation]:
            if kills and self.hosts[self.ranks[pid].host].link:
                self.die(pid)
        silent = [name for name, host in self.hosts.items() if self.now - host.heard > 1.5]
        self.supervise(self.plan.generation_over(generation, 1, self.now, self.reached == self.sizes[generation],
                                                 silent))

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        self.now += STEP_S
        self.supervise(self.plan.hosts_found(dict.fromkeys(self.listed, self.slots), self.now))
        for host in self.hosts.values():
            if host.agent is not None and host.link and not (host.has_line and host.heard < float("inf")):
                self.connect(host)
            elif host.agent is not None and host.link:
                host.heard = self.now
                self.keep(host, host.agent.beat(self.plan.generation, self.now, self.now))
            elif self.now - host.heard > HOST_LOST_AFTER_S:
                self.supervise(self.plan.host_lost(host.name, "silent", self.now))
                host.heard = float("inf")
            if host.agent is not None:
                self.keep(host, host.agent.tick(self.now))
        self.supervise(self.plan.tick(self.now))
        asked = self.plan.asked(self.now)
        self.supervise(self.plan.answered([name for name in asked if self.hosts[name].is_up and self.hosts[name].link],
                                          self.now))
        count = sum(rank.generation == self.mpirun for rank in self.ranks.values())
        if self.mpirun is not None and count < self.sizes[self.mpirun] and self.now - self.started_at > 30.0:
            self.end_mpirun(kills=True)  # --start-timeout
        elif self.mpirun is not None and count == 0 and self.random.random() < 0.5:
            self.end_mpirun(kills=True)  # mpirun reaches no host.
        self.train()

    def train(self) -> None:
        """The ranks of each generation take a step and commit it, if all of them are there and connected."""
        for generation in {rank.generation for rank in self.ranks.values()}:
            members = [rank for rank in self.ranks.values() if rank.generation == generation]
            if len(members) < self.sizes[generation] or len({self.hosts[rank.host].link for rank in members}) > 1:
                # A loss: mpirun ends the others, unless it cannot reach them.
                # It may also end by itself when a daemon is out of reach, before or after the supervisor knows.
                if generation == self.mpirun and (all(self.hosts[rank.host].link for rank in members)
                                                  or self.random.random() < 0.1):
                    self.end_mpirun(kills=True)
                continue
            leaves = any(rank.must_leave for rank in members)
            self.steps += 1
            for rank in {each.host: each for each in reversed(members)}.values():  # the first of each host
                host = self.hosts[rank.host]
                if host.agent is not None:
                    self.keep(host, host.agent.asked_to_write(rank.pid, CommitId(rank.generation, self.steps), False,
                                                               self.now))
            if leaves or self.steps >= STEPS_OF_JOB:
                for rank in members:
                    host = self.hosts[rank.host]
                    if host.agent is not None:
                        self.keep(host, host.agent.ended(rank.pid, LEAVE_CODE if leaves else 0, ""))
                    self.ranks.pop(rank.pid, None)
                if generation == self.mpirun:
                    self.end_mpirun(kills=False)


FAULTS = ("kill a rank", "kill a host", "kill an agent", "cut a link", "mend a link", "start a host", "drop a host",
          "list a host", "nothing", "SIGTERM")


def fault(world: World, kind: str) -> None:
    hosts = sorted(world.hosts)
    name = world.random.choice(hosts)
    host = world.hosts[name]
    if kind == "kill a rank" and world.ranks:
        world.die(world.random.choice(sorted(world.ranks)))
    elif kind == "kill a host" and host.is_up:
        host.is_up, host.agent, host.heard, host.has_line = False, None, float("inf"), False
        for pid in [pid for pid, rank in world.ranks.items() if rank.host == name]:
            del world.ranks[pid]
        world.supervise(world.plan.agent_gone(name, "its connection is broken", world.now))
    elif kind == "kill an agent" and host.agent is not None and host.link:
        # Its ranks start another one, and hand over what they hold.
        held = host.agent.newest
        ranks = [rank for rank in world.ranks.values() if rank.host == name]
        host.agent, host.heard, host.has_line, host.unsent = None, float("inf"), False, []
        world.supervise(world.plan.agent_gone(name, "its connection is broken", world.now))
        if ranks:
            host.agent = AgentState(world.now)
            world.connect(host)
            for rank in ranks:
                world.keep(host, host.agent.hello(rank.pid, rank.rank, rank.pid, rank.generation, is_connected=True))
                if held is not None and rank.pid in world.ranks:
                    world.keep(host, host.agent.asked_to_write(rank.pid, held.id, True, world.now))
    elif kind == "cut a link":
        host.link = False
    elif kind == "mend a link":
        host.link = True
    elif kind == "start a host":
        host.is_up = True
    elif kind == "drop a host":
        world.listed.discard(name)
    elif kind == "list a host":
        world.listed.add(name)
    elif kind == "SIGTERM" and world.random.random() < 0.1:
        world.supervise(world.plan.signalled("SIGTERM", 143, False, world.now))


@pytest.mark.nightly
@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 8), slots=st.integers(1, 8), seed=st.integers(0, 10**6),
       faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 30)), max_size=25))
def test_every_job_ends_and_generations_commit_in_turn(count: int, slots: int, seed: int,
                                                            faults: list[tuple[str, int]]) -> None:
    limits = Limits(min_np=1, max_np=count * slots, timeout_s=60.0, cooldown_s=(5.0, 20.0))
    world = World(limits, {f"node{i}": SimulatedHost(f"node{i}") for i in range(count)}, slots, seed)
    for kind, steps in faults:
        fault(world, kind)
        for _ in range(steps):
            if world.done is None:
                world.advance()
    for host in world.hosts.values():  # The faults are over.
        host.link = host.is_up = True
    for _ in range(int(300 / STEP_S)):
        if world.done is None:
            world.advance()
    assert world.done is not None, "the job has no end"
    # Commits of a generation come before all commits of later ones. That an agent gets one again is none.
    generations = [commit.generation for place, commit in enumerate(world.commits)
                   if commit not in world.commits[:place]]
    assert generations == sorted(generations), "an old generation has committed beside a new one"
    if world.done.code == 0:
        assert world.steps >= STEPS_OF_JOB


def test_a_job_without_faults_is_done_in_one_generation() -> None:
    world = World(Limits(max_np=4), {"a0": SimulatedHost("a0"), "b0": SimulatedHost("b0")}, 2, 0)
    while world.done is None:
        world.advance()
    assert world.done == Done(0, "") and world.sizes == {1: 4}


# -- single decisions -------------------------------------------------------------------------------------------------


def starting(ranks: int = 2, own: Sequence[str] = ()) -> Plan:
    """A plan whose first mpirun has begun, for ranks on `a`; no rank has been heard of."""
    found = Plan(Limits(max_np=ranks), 0.0, own=own)
    found.hosts_found({"a": ranks}, 0.0)
    found.tick(0.0)
    return found


def connect(job: Plan, generation: int, hosts: str) -> None:
    """All ranks of a generation have left init(). `hosts` has a letter for each rank, and they are 100, 101, ..."""
    for rank, host in enumerate(hosts):
        job.hello(host, rank, 100 * generation + rank, generation, is_connected=True)


def end(job: Plan, generation: int, hosts: str, now: float, code: int | None = None) -> None:
    """The agents tell how the ranks that `connect` has connected have ended. They have died if there is no code."""
    for pid, host in enumerate(hosts, 100 * generation):
        if code is None:
            job.died(host, pid, generation, now)
        else:
            job.ended(host, pid, generation, code, "", now)


def running(limits: Limits | None = None, hosts: dict[str, int] | None = None, saves: bool = True) -> Plan:
    """A plan whose first generation runs, with two ranks on `a` unless `hosts` says otherwise."""
    found = Plan(limits or Limits(max_np=2), 0.0, saves)
    found.hosts_found(hosts or {"a": 2}, 0.0)
    start, = found.tick(0.0)
    assert isinstance(start, Start)
    connect(found, 1, "".join(host * slots for host, slots in start.hosts))
    return found


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_the_exit_codes_of_all_ranks_are_success_and_that_of_mpirun_is_not() -> None:
    job = running()
    job.died("a", 101, 1, 1.0)
    assert job.generation_over(1, 0, 1.5) == []
    assert job.tick(3.0) == [Start(2, 2, (("a", 2),))]
    job = running()
    end(job, 1, "aa", 1.0, 0)
    assert job.generation_over(1, 143, 2.0) == [Done(0, "")]


def test_too_few_hosts_are_waited_for_and_then_an_end() -> None:
    job = running(Limits(min_np=2, max_np=4, timeout_s=10.0), {"a": 2, "b": 2})
    job.hosts_found({"a": 1}, 1.0)
    job.generation_over(1, 1, 2.0)
    assert "waits for hosts" in job.tick(3.0)[0].text and job.tick(4.0) == []
    done, = job.tick(13.0)
    assert isinstance(done, Done) and done.code == 1 and "--min-np 2" in done.why


def test_a_lost_host_is_left_out_for_longer_each_time() -> None:
    job = running(Limits(max_np=4, cooldown_s=(10.0, 100.0)), {"a": 2, "b": 2})
    assert kinds(job.host_lost("b", "silent", 1.0)) == [Say, Stop]
    job.committed(CommitId(1, 1), "")
    job.generation_over(1, 0, 2.0)
    assert job.tick(2.0) == []  # The agent of `a` has not told yet how its ranks have ended.
    end(job, 1, "aa", 2.0)
    assert job.tick(2.0) == [Start(2, 2, (("a", 2),))]
    job.hello("a", 0, 200, 2)
    assert job.answered(["b"], 10.9) == [] and job.asked(10.9) == {"a"}
    assert job.asked(11.1) == {"a", "b"} and Leave(2, "there is room for 4 ranks instead of 2") in job.tick(11.1)
    job.ended("a", 200, 2, LEAVE_CODE, "", 12.0)
    job.generation_over(2, 0, 12.0)
    assert job.tick(12.0) == [Start(3, 4, (("a", 2), ("b", 2)))]
    job.hello("b", 2, 300, 3)
    job.host_lost("b", "silent", 13.0)
    job.committed(CommitId(3, 1), "")
    job.generation_over(3, 0, 13.0)
    assert job.tick(13.0) == [Start(4, 2, (("a", 2),))]
    job.hello("a", 0, 400, 4)
    assert job.answered(["b"], 32.0) == [] and kinds(job.tick(33.1)) == [Say, Leave]


@pytest.mark.parametrize("restart_failed", [False, True])
def test_the_place_of_a_lost_rank_is_filled_again_only_if_asked_for(restart_failed: bool) -> None:
    job = running(Limits(max_np=2, restart_failed=restart_failed))
    job.died("a", 101, 1, 1.0)
    actions = job.renamed("a", 100, 1, 0, 1, 1.2)
    assert (Leave in kinds(actions)) == restart_failed
    assert job.tick(30.0) == []  # The loss is mended.
    job.ended("a", 100, 1, LEAVE_CODE if restart_failed else 0, "", 31.0)
    over = job.generation_over(1, 0, 31.0)
    assert over == ([] if restart_failed else [Done(0, "")])


def test_a_loss_that_is_not_mended_ends_the_generation() -> None:
    job = running()
    job.died("a", 101, 1, 1.0)
    assert job.tick(10.0) == []
    assert kinds(job.tick(20.0)) == [Stop]


def test_sigterm_ends_the_job_at_the_next_commit() -> None:
    job = running()
    assert kinds(job.signalled("SIGTERM", 143, False, 1.0)) == [Say, Leave]
    job.committed(CommitId(1, 5), "")
    end(job, 1, "aa", 2.0, LEAVE_CODE)
    done, = job.generation_over(1, 0, 2.0)
    assert done == Done(PREEMPTED_CODE, "SIGTERM has arrived. The job can go on later from commit 5 of generation 1")
    assert kinds(running().signalled("SIGTERM", 143, True, 1.1)) == [Stop]


def test_after_sigterm_a_rank_that_fails_gives_the_exit_code_and_a_job_that_saves_nothing_cannot_go_on() -> None:
    job = running(saves=False)
    job.signalled("SIGTERM", 143, False, 1.0)
    job.committed(CommitId(1, 5), "")
    end(job, 1, "aa", 2.0, LEAVE_CODE)
    assert job.generation_over(1, 0, 2.0) == [Done(PREEMPTED_CODE, "SIGTERM has arrived")]
    job = running()
    job.signalled("SIGTERM", 143, False, 1.0)
    job.ended("a", 100, 1, 3, "", 2.0)
    assert job.generation_over(1, 3, 2.0) == [Done(3, "SIGTERM has arrived, and generation 1 has failed")]


@pytest.mark.parametrize("phase", ["no rank is there yet", "it trains", "it leaves", "it backs off",
                                   "it waits for hosts"])
@pytest.mark.parametrize(("name", "code", "is_urgent", "wanted"), [
    ("SIGTERM", 143, False, PREEMPTED_CODE), ("SIGTERM", 143, True, 143), ("SIGINT", 130, True, 130)])
def test_a_signal_has_one_exit_code_in_all_phases(phase: str, name: str, code: int, is_urgent: bool,
                                                                wanted: int) -> None:
    job = running(Limits(max_np=4))
    if phase == "no rank is there yet":
        job = starting()
    elif phase == "it leaves":
        job.preempted("a", 1, "SIGUSR1", 0.5)
    elif phase != "it trains":
        job.generation_over(1, 1, 0.5)
        if phase == "it waits for hosts":
            job.hosts_found({}, 0.5)
            assert kinds(job.tick(0.6)) == [Say]
    actions = job.signalled(name, code, is_urgent, 1.0)
    # What is there of the ranks ends, with the code of a signal for mpirun.
    done, = [*actions, *job.generation_over(1, 143, 2.0)][-1:]
    assert isinstance(done, Done) and done.code == wanted


def test_a_signal_that_is_sent_to_the_process_and_to_its_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = [], [5.0]
    control = elastic_run._Control()
    control.service = SimpleNamespace(signalled=lambda *of: took.append(of))  # type: ignore[assignment]
    monkeypatch.setattr(elastic_run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for later, is_taken in ((0.0, True), (0.01, True), (1.0, False)):
        now[0] += later
        assert control.takes(signal.SIGTERM) is is_taken
    assert [is_urgent for _, _, is_urgent in took] == [False, False, True]


def test_a_host_that_is_taken_away_leaves_at_a_commit() -> None:
    job = running(Limits(max_np=4), {"a": 2, "b": 2})
    assert kinds(job.preempted("b", 1, "SIGTERM", 1.0)) == [Say, Leave]
    end(job, 1, "aabb", 2.0, LEAVE_CODE)
    job.generation_over(1, 0, 2.0)
    assert job.tick(2.0) == [Start(2, 2, (("a", 2),))]


def test_a_rank_that_ends_before_init_ends_the_generation() -> None:
    job = starting()
    job.hello("a", 0, 100, 1)
    job.missing(1, 1, 5.0)
    job.missing(1, 1, 6.5)  # It is told again and again.
    assert job.tick(6.9) == []
    assert job.tick(7.1) == [Stop(1, "ranks [1] ended before init()")] and job.tick(7.2) == []
    assert job.died("a", 100, 1, 7.5) == []  # with its mpirun
    assert job.generation_over(1, 1, 8.0) == []
    job.missing(1, 1, 8.1)  # late
    assert job.tick(9.1) == [Start(2, 2, (("a", 2),))]
    assert job.tick(20.0) == []


def test_a_process_that_has_ended_after_the_rank_was_heard_is_not_missing() -> None:
    """A shell around it, or the news came late."""
    job = starting(1)
    job.missing(1, 0, 5.0)
    job.hello("a", 0, 100, 1)
    assert job.tick(9.0) == [] and job.heard == {0}


def test_a_loss_before_all_ranks_have_left_init_is_not_waited_for() -> None:
    job = starting()
    job.hello("a", 0, 100, 1)
    job.hello("a", 1, 101, 1)
    job.hello("a", 1, 101, 1, is_connected=True)
    job.died("a", 101, 1, 1.0)
    assert job.tick(2.9) == []
    assert job.tick(3.1) == [Stop(1, "a rank was lost before all ranks had left init()")]


@pytest.mark.parametrize(("code", "wanted"), [(7, 7), (0, 1), (PREEMPTED_CODE, 1)])
def test_a_job_that_has_failed_for_good_has_no_exit_code_of_one_that_can_go_on(code: int, wanted: int) -> None:
    job = running(Limits(max_np=2, resets=0))
    job.committed(CommitId(1, 12), "epoch 3")
    done, = job.generation_over(1, code, 1.0)
    assert isinstance(done, Done) and done.code == wanted and "--reset-limit 0" in done.why
    assert "commit 12 of generation 1 (epoch 3)" in done.why
    job, now = running(), 1.0
    for generation in (1, 2):
        job.generation_over(generation, code, now)
        now += 30.0
        assert kinds(job.tick(now)) == [Start]
    done, = job.generation_over(3, code, now)
    assert isinstance(done, Done) and done.code == wanted and "3 generations in a row" in done.why


def test_a_host_is_not_left_out_if_nothing_else_is_left_and_it_is_there() -> None:
    def after_a_loss(own: str, has_agent: bool) -> list[Action]:
        job = starting(own=[own])
        job.hello("a", 0, 100, 1, is_connected=True)
        job.committed(CommitId(1, 1), "")
        job.host_lost("a", "silent", 1.0)
        job.generation_over(1, 1, 2.0)
        if has_agent:
            job.agent_found("a")
        return job.tick(2.0)

    assert kinds(after_a_loss(own="a", has_agent=False)) == [Start]
    assert kinds(after_a_loss(own="b", has_agent=True)) == [Start]
    assert kinds(after_a_loss(own="b", has_agent=False)) == [Say]  # It waits for hosts.


def test_a_host_whose_agent_is_gone_is_lost_if_no_other_comes_or_mpirun_ends() -> None:
    for ends in (False, True):
        job = running(Limits(max_np=4), {"a": 2, "b": 2})
        job.committed(CommitId(1, 1), "")
        assert job.agent_gone("b", "its agent has ended", 1.0) == [] and job.tick(25.9) == []
        if ends:
            end(job, 1, "aa", 25.9)
            assert job.generation_over(1, 1, 25.9) == [Say("b is lost: its agent has ended")]
            assert job.tick(25.9) == [Start(2, 2, (("a", 2),))]
        else:
            assert kinds(job.tick(26.0)) == [Say, Stop]
    job = running(Limits(max_np=4), {"a": 2, "b": 2})
    job.agent_gone("b", "its agent has ended", 1.0)
    job.agent_found("b")
    assert job.tick(30.0) == []
    job.agent_gone("b", "its agent has ended", 30.0)
    assert job.host_lost("a", "silent", 30.1)[0] == Say("a is lost: silent") and job.tick(30.2) == []


def test_a_rank_that_was_lost_with_its_agent_is_known_to_be_lost_when_the_others_go_on() -> None:
    job = running()
    job.agent_gone("a", "its agent has ended", 1.0)
    job.agent_found("a")
    job.hello("a", 0, 100, 1, is_connected=True)
    assert job.renamed("a", 100, 1, 0, 1, 1.5) == [Say("generation 1 goes on with 1 rank")]
    job.ended("a", 100, 1, 0, "", 9.0)
    assert job.generation_over(1, 0, 9.5) == [Done(0, "")]


def test_an_mpirun_that_does_not_end_after_its_ranks_is_stopped_after_a_success_as_such() -> None:
    job = running()
    end(job, 1, "aa", 1.0, 0)
    assert job.tick(15.9) == []
    stop, = job.tick(16.1)
    assert isinstance(stop, Stop) and stop.is_done
    assert job.tick(18.0) == [] and job.generation_over(1, 1, 19.0) == [Done(0, "")]
    job = running()
    job.ended("a", 100, 1, 0, "", 1.0)
    job.ended("a", 101, 1, 3, "", 1.0)
    stop, = job.tick(16.1)
    assert isinstance(stop, Stop) and not stop.is_done


# -- agents ----------------------------------------------------------------------------------------------------------


def a_agent(rank: int = 0) -> AgentState:
    """An agent that the supervisor has just answered, with a rank on line 1."""
    agent = AgentState(0.0)
    agent.beat(1, 0.0, 0.0)
    agent.hello(1, rank, 4711, 1, launcher=4000, is_connected=True)
    return agent


def told(actions: list[AgentAction]) -> list[tuple[object, str]]:
    return [(action.to, action.message["kind"]) for action in actions if isinstance(action, Tell)]


def test_a_agent_keeps_the_last_two_commits_in_two_files() -> None:
    agent, paths = a_agent(), []
    for number in range(1, 5):
        there, = agent.asked_to_write(1, CommitId(1, number), False, 0.1)
        paths.append(there.message["path"])
        assert agent.newest is None or there.message["path"] != str(agent.newest.index)
        assert told(agent.written(1, 100, "", 0.1)) == [(None, "committed"), (1, "kept")]
        assert agent.newest is not None and agent.newest.id.number == number
    assert paths == ["0", "1", "0", "1"]
    kept, = agent.asked_to_write(1, CommitId(1, 3), True, 0.2)  # An old one is not taken for the newest.
    assert kept.message["newest"]["number"] == 4


def test_one_rank_at_a_time_writes() -> None:
    agent = a_agent()
    agent.hello(2, 1, 4712, 1)
    assert told(agent.asked_to_write(1, CommitId(1, 7), True, 0.1)) == [(1, "there")]
    assert agent.asked_to_write(2, CommitId(1, 7), True, 0.1) == []
    # The second one has the same commit, which is there by now.
    assert told(agent.written(1, 100, "", 0.2)) == [(None, "committed"), (1, "kept"), (2, "kept")]
    agent.asked_to_write(1, CommitId(1, 8), False, 0.3)
    agent.asked_to_write(2, CommitId(1, 8), True, 0.3)
    agent.closed(1)  # It has died while it wrote.
    assert told(agent.tick(0.4)) == [(2, "there")]


def test_a_agent_takes_no_commit_after_a_silence_and_ends_the_ranks_before_the_supervisor_gives_it_up() -> None:
    agent = a_agent()
    assert COMMIT_LIMIT_S < LOST_AFTER_S < HOST_LOST_AFTER_S
    assert [agent.tick(0.25 * beat) for beat in range(17)] == [[]] * 17
    assert agent.asked_to_write(1, CommitId(1, 1), False, COMMIT_LIMIT_S + 0.1) == []
    *beats, last = (agent.tick(0.25 * beat) for beat in range(17, 22))
    assert beats == [[]] * 4
    assert last[:3] == [Kill(4711), Kill(4000), Connect()]
    assert told(last) == [(None, "cut off")] and agent.newest is None
    agent = a_agent()
    agent.ended(1, 0, "")
    assert [told(agent.tick(0.25 * beat)) for beat in range(22)] == [[]] * 22


def test_a_commit_waits_for_the_supervisor_and_an_old_answer_says_nothing() -> None:
    agent = a_agent()
    agent.asked_to_write(1, CommitId(1, 1), False, 4.1)
    assert agent.beat(1, 0.0, 4.2) == []  # It was on its way for long.
    assert told(agent.beat(1, 4.2, 4.3)) == [(1, "there")]
    assert told(agent.written(1, 100, "", 8.1)) == [(None, "committed"), (1, "kept")]
    agent.asked_to_write(1, CommitId(1, 2), False, 8.1)
    assert agent.written(1, 100, "", 8.3) == []
    assert told(agent.beat(1, 8.3, 8.4)) == [(None, "committed"), (1, "kept")]


def test_a_agent_that_was_stopped_itself_waits_for_an_answer_before_it_ends_ranks() -> None:
    agent = a_agent()
    agent.tick(0.5)
    assert agent.tick(12.5) == []  # All processes were stopped, and go on.
    assert agent.beat(1, 0.5, 12.5) == [] and agent.asked_to_write(1, CommitId(1, 1), False, 12.5) == []
    assert told(agent.beat(1, 12.6, 12.7)) == [(1, "there")]
    assert agent.tick(14.0) == [] and agent.tick(15.4) == [] and agent.tick(16.8) == []
    agent = a_agent()
    agent.tick(12.5)  # It alone was stopped, and the supervisor has gone on without it.
    assert agent.beat(2, 12.6, 12.7) == [Kill(4711)]
    agent = a_agent()
    agent.tick(12.5)  # The supervisor is out of reach.
    assert agent.tick(13.9) == [] and Connect() in agent.tick(14.6)


def test_a_agent_that_is_cut_off_stays_with_its_commits_and_not_for_ever() -> None:
    agent = a_agent()
    agent.asked_to_write(1, CommitId(1, 1), False, 0.1)
    agent.written(1, 100, "", 0.1)
    for beat in range(1, 30):
        agent.tick(0.25 * beat)
    agent.closed(1)
    assert agent.hello(2, 0, 4712, 1) == [Kill(4712)]  # of the generation that was ended
    agent.beat(2, 20.0, 20.0)
    welcome = agent.hello(3, 0, 4713, 2)[0]
    assert welcome.message["newest"]["number"] == 1
    now = 20.0
    while now < 20.0 + STAY_S:
        now += 0.5
        assert not any(isinstance(action, End) for action in agent.tick(now))
    assert any(End in kinds(agent.tick(now + beat)) for beat in range(10))


def test_a_agent_that_connects_again_names_its_ranks_and_keeps_no_commit_until_it_is_answered() -> None:
    agent = a_agent()
    assert agent.disconnected() == [Connect()]
    assert agent.asked_to_write(1, CommitId(1, 1), False, 0.1) == []
    assert told(agent.connected()) == [(None, "hello")]
    assert told(agent.beat(1, 0.2, 0.2)) == [(1, "there")]


def test_a_new_generation_ends_the_ranks_of_the_one_before() -> None:
    agent = a_agent()
    assert agent.beat(2, 1.0, 1.0) == [Kill(4711)]
    assert told(agent.asked_to_write(1, CommitId(1, 1), False, 1.0)) == [(1, "kept")] and agent.newest is None
    assert agent.hello(2, 0, 4712, 1) == [Kill(4712)]


def test_a_rank_that_starts_after_the_news_hears_that_it_is_to_leave() -> None:
    agent = AgentState(0.0)
    agent.beat(1, 0.0, 0.0)
    agent.leave(1, "a host comes")
    assert [kind for to, kind in told(agent.hello(1, 0, 4711, 1)) if to == 1] == ["welcome", "leave"]
    agent = AgentState(0.0)
    agent.leave(1, "a host comes")  # It has just connected.
    assert [kind for to, kind in told(agent.hello(1, 0, 4711, 1)) if to == 1] == ["welcome", "leave"]


def test_ranks_that_the_supervisor_cannot_reach_stop_before_others_go_on() -> None:
    world = World(Limits(max_np=2), {"a0": SimulatedHost("a0"), "b": SimulatedHost("b")}, 1, 0)
    world.listed = {"a0"}
    world.advance()
    world.advance()
    fault(world, "list a host")
    world.listed = {"a0", "b"}
    world.hosts["a0"].link = False
    for _ in range(int(30 / STEP_S)):
        if world.done is None:
            world.advance()
    generations = [commit.generation for commit in world.commits]
    assert generations == sorted(generations) and set(generations) == {1, 2}


def test_a_host_that_is_lost_after_the_generation_has_ended_is_left_out() -> None:
    job = running(Limits(max_np=4), {"a": 2, "b": 2})
    job.agent_found("a")
    job.agent_found("b")
    job.committed(CommitId(1, 3), "")
    assert job.generation_over(1, 255, 5.0, silent=["b"]) == []
    assert job.tick(5.5) == []
    end(job, 1, "aa", 5.6)
    assert job.tick(5.7) == []
    assert job.host_lost("b", "no sign of life", 6.0)
    assert job.tick(6.0) == [Start(2, 2, (("a", 2),))]


def test_mpirun_may_end_before_the_loss_of_a_host_is_known() -> None:
    job = running(Limits(max_np=4), {"a": 2, "b": 2})
    job.committed(CommitId(1, 3), "")
    job.died("a", 100, 1, 5.0)  # with its mpirun, which has lost a daemon
    job.generation_over(1, 1, 5.0)
    job.died("a", 101, 1, 5.1)
    assert job.tick(5.1) == []  # No agent has told how the ranks of `b` have ended.
    assert kinds(job.host_lost("b", "its connection is broken", 5.2)) == [Say]
    assert job.tick(5.2) == [Start(2, 2, (("a", 2),))]


def test_a_agent_that_does_not_tell_how_its_ranks_have_ended_is_not_waited_for() -> None:
    job = running()
    job.committed(CommitId(1, 3), "")
    job.generation_over(1, 1, 5.0)
    assert job.tick(5.9) == [] and job.tick(6.0) == [Start(2, 2, (("a", 2),))]


def test_a_host_that_is_silent_for_a_moment_only_stays() -> None:
    job = running(Limits(max_np=4), {"a": 2, "b": 2})
    job.committed(CommitId(1, 3), "")
    job.generation_over(1, 255, 5.0, silent=["b"])
    assert job.tick(9.0) == [] and job.tick(10.1) == [Start(2, 4, (("a", 2), ("b", 2)))]


def test_a_generation_that_was_to_leave_is_followed_at_once_by_the_next() -> None:
    job = running(Limits(max_np=4), {"a": 1, "b": 1})
    assert job.hosts_found({"a": 1, "b": 1, "c": 1}, 1.0) == [] and job.asked(1.0) == {"a", "b", "c"}
    assert kinds(job.answered(["c"], 1.0)) == [Say, Leave]
    end(job, 1, "ab", 90.0, LEAVE_CODE)  # The next commit was far.
    job.generation_over(1, 0, 90.0, silent=["b"])
    assert job.tick(90.0) == [Start(2, 3, (("a", 1), ("b", 1), ("c", 1)))]


# -- hosts that are gone ----------------------------------------------------------------------------------------------


def after_a_cut(limits: Limits, kept: str = "", own: str = "login") -> Plan:
    """A plan whose first generation has committed on `a` and `b`; the links to those that are not `kept` are cut."""
    job = Plan(limits, 0.0, own=[own])
    job.hosts_found({"a": 2, "b": 2}, 0.0)
    job.tick(0.0)
    connect(job, 1, "aabb")
    for host in "ab":
        job.agent_found(host)
    job.committed(CommitId(1, 9), "")
    for host in "ab":
        if host not in kept:
            job.host_lost(host, "no sign of life", 10.0)
        else:
            end(job, 1, "aa" if host == "a" else "", 10.0)
    assert job.generation_over(1, 255, 10.0) == []
    return job


def vain_starts(job: Plan, until: float, now: float = 10.0, seconds: float = 3.0) -> tuple[list[float], Done | None]:
    """Let time pass. When mpiruns that start nobody have begun, and how the job has ended."""
    begun, over_at = [], float("inf")
    while now < until:
        now += 0.5
        actions = job.tick(now)
        if now >= over_at:
            actions += job.generation_over(job.generation, 1, now, has_started=False)
            over_at = float("inf")
        for action in actions:
            if isinstance(action, Done):
                return begun, action
            if isinstance(action, Start):
                begun.append(now)
                over_at = now + seconds
    return begun, None


@pytest.mark.parametrize("own", ["a", "login"])
@pytest.mark.parametrize("cooldown_s", [(10.0, 20.0), (30.0, 600.0)])
def test_a_healthy_generation_goes_on_without_a_host_that_is_silent(cooldown_s: tuple[float, float], own: str) -> None:
    job = after_a_cut(Limits(max_np=4, cooldown_s=cooldown_s), kept="a", own=own)
    assert job.tick(10.5) == [Start(2, 2, (("a", 2),))]
    connect(job, 2, "aa")
    for second in range(11, 4000):
        job.committed(CommitId(2, second), "")
        # A host that is new, and cannot be reached either.
        assert job.tick(second) == [] == job.hosts_found({"a": 2, "b": 2, "c": 2}, second)
    assert job.asked(4000.0) == {"b", "c"}
    assert kinds(job.answered(["c"], 4000.0)) == [Say, Leave]
    end(job, 2, "aa", 4001.0, LEAVE_CODE)
    job.generation_over(2, 0, 4001.0)
    assert job.tick(4001.0) == [Start(3, 4, (("a", 2), ("c", 2)))]
    job.agent_found("b")
    assert job.tick(4002.0) == []  # There is no place for it.


@pytest.mark.parametrize(("kept", "min_np"), [("", 1), ("a", 4)])
@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_starts_that_start_nobody_are_no_failures_and_the_job_waits(kept: str, min_np: int, seconds: float) -> None:
    """No reset, and no generation without a commit, counts; the hosts may be unreachable for long."""
    limits = Limits(min_np=min_np, max_np=4, resets=1)
    begun, done = vain_starts(after_a_cut(limits, kept), 1000.0, seconds=seconds)
    assert len(begun) == 4 and begun[-1] > 400.0
    assert done is not None and done.code == 1 and "--elastic-timeout" in done.why and "commit 9" in done.why
    job = after_a_cut(limits, kept)
    assert vain_starts(job, 440.0, seconds=seconds)[1] is None
    for host in "ab":
        job.agent_found(host)  # The link is mended.
    start, = job.tick(440.5)
    assert isinstance(start, Start) and start.ranks == 4


def test_a_host_where_nothing_starts_is_left_out_and_the_others_go_on() -> None:
    for answering in ([], ["a"]):
        job = after_a_cut(Limits(max_np=4), kept="" if answering else "a")
        job.agent_found("b")
        job.answered(answering, 41.0)
        assert job.tick(41.0) == [Start(2, 4, (("a", 2), ("b", 2)))]
        job.agent_gone("b", "its connection is broken", 42.0)
        job.answered(answering, 70.0)
        assert kinds(job.generation_over(2, 1, 71.0, has_started=False)) == [Say]
        assert job.tick(71.5) == [Start(3, 2, (("a", 2),))]


def test_a_lost_host_that_answers_is_not_left_out_if_the_others_are_too_few() -> None:
    """It has been started anew, say, and has no agent."""
    job = after_a_cut(Limits(min_np=4, max_np=4), kept="a")
    assert kinds(job.tick(11.0)) == [Say] and job.asked(11.0) == {"b"}
    assert job.answered(["b"], 20.0) == [] and job.tick(20.5) == [Start(2, 4, (("a", 2), ("b", 2)))]
    # If nothing starts there all the same, an answer is not enough.
    job.answered(["b"], 24.0)
    assert kinds(job.generation_over(2, 1, 25.0, has_started=False)) == [Say]
    job.answered(["b"], 26.0)
    assert job.tick(26.5) == [] and kinds(job.tick(86.0)) == [Start]


def test_starts_that_fail_where_all_hosts_are_reached_are_failures() -> None:
    job, now = Plan(Limits(max_np=2), 0.0, own=["a"]), 0.0
    job.hosts_found({"a": 2}, 0.0)
    begun, done = vain_starts(job, 100.0, now)
    assert len(begun) == 3 and done is not None and "3 generations in a row" in done.why


def test_a_commit_counts_however_its_generation_ends() -> None:
    job, now = running(Limits(max_np=4), {"a": 2}), 0.0
    for generation in range(1, 20):
        now += 100.0
        if generation % 2:  # It ends before a commit.
            assert job.generation_over(generation, 1, now) == []
        else:
            connect(job, generation, "aa")
            job.committed(CommitId(generation, 1), "")
            job.preempted("a", generation, "SIGUSR1", now)
            end(job, generation, "aa", now, LEAVE_CODE)
            assert job.generation_over(generation, 0, now) == []
        now += 1000.0
        assert kinds(job.tick(now)) == [Start]
