"""A rank is killed (SIGKILL) at each named step of a save; what was committed before, or what is committed now, always loads.

    python -m pytest tests/faults -m "slow or not slow"      all of it: 1500 kills, some ten minutes on two cores
    python -m pytest tests/faults -m "not slow"              a handful of kills, and every storage fault

The last line of the run says how many ranks were killed, at how many named steps.

A round: ranks forked from one warm process (worker.py) commit version 1, find leftovers of made-up crashes planted in the
save_dir, and save version 2, in which one of them dies. Then, with no help of anything hidden (it is copied without):

  * `latest` names a directory in which every rank's file loads bit-identical to version 1 or to version 2, all the same one;
    which of the two is known for most steps, and is checked
  * every visible directory is one whole save, so a tag that is overwritten is never missing and never mixed; `verify` agrees
    (without the kernel's exchange, as on NFS, there is an instant at which it is missing: what it was is found whole beside it,
    and is put back by the next save)
  * every surviving rank raised CommitError within the timeout, or was through with its commit

and new processes save version 3 under the tag of the save that died, and nothing hidden is left.

The steps are those of a round without a kill, so a step that is new in the product is killed at without a change here. Of the
writes of a file's records, which are all alike, the first, one in the middle and the last are taken. The killed process loses
nothing that it handed to the kernel, so these kills say nothing about durability; `test_order_of_syncs` in test_storage.py
looks at the order of writes and syncs instead.
"""
from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
from faults.rounds import Round, Server, check, hidden, version_in  # noqa: E402

TIMEOUT = 4.0    # of the configuration, in seconds
MARGIN = 12.0    # what a rank may take beyond it, on a machine with little to spare
AT_A_TIME = 4    # rounds side by side


@dataclass(frozen=True)
class Scenario:
    """What is saved when a rank dies. `old`, `new` are tags of versions 1 and 2; None: the save that dies is the first one."""
    old: str | None = "global_step1"
    new: str = "global_step2"
    world: int = 2
    nodes: int = 1
    exchange: bool = True
    asynchronous: bool = False  # then the steps are those of the thread behind training, and nothing is gathered over gloo

    def saves(self) -> list[dict]:
        faults = [] if self.exchange else [[list(range(self.world)), "no_exchange", {}]]
        old = [dict(tag=self.old, version=1, faults=faults)] if self.old else []
        return [*old, dict(tag=self.new, version=2, faults=faults, plant=[self.new, "global_step0"])]

    def job(self, where: Path, **more) -> dict:
        return dict(out=str(where / "out"), save_dir=str(where / "checkpoints"), world=self.world, nodes=self.nodes,
                    timeout=TIMEOUT, saves=self.saves(), block={"async": self.asynchronous}, **more)


SCENARIOS = {
    "first": dict(old=None),
    "new_tag": dict(),
    "overwrite": dict(old="global_step2"),
    "overwrite_without_exchange": dict(old="global_step2", exchange=False),
    "async_first": dict(old=None, asynchronous=True),
    "async_new_tag": dict(asynchronous=True),
    "async_overwrite": dict(old="global_step2", asynchronous=True),
}


def dry_run(server: Server, scenario: Scenario, where: Path) -> Round:
    """The round without a kill: all goes well, and every kind of step is met."""
    done = server.run(scenario.job(where / "dry", trace=True))
    done.expect(len(scenario.saves()) - 1, error=None)
    save_dir = where / "dry" / "checkpoints"
    assert check(save_dir, scenario.world)[scenario.new] == 2 and hidden(save_dir) == []
    kinds = {name.split(" ")[0].split(":")[0] for name in done.traces[0]}
    expected = set("gather all_gather stage publish write_latest sync_directory fsync replace write_at rmtree".split())
    if scenario.asynchronous:
        expected.remove("all_gather")
    expected |= {"exchange"} if scenario.old == scenario.new else {"rename"}
    assert kinds >= expected, f"no longer a step of a save: {expected - kinds}"
    return done


def kill_points(trace: list[str], nodes: int) -> list[tuple[int, str, int]]:
    """(place in the trace, step, occurrence) of each step to die at. The leaders of several nodes clear leftovers at the same
    time, so which of them comes to do it is not the same in each round."""
    cleared = next(place for place, step in enumerate(trace) if step.startswith("gather"))
    seen, points = {}, []
    for place, step in enumerate(trace):
        seen[step] = seen.get(step, 0) + 1
        points.append((place, step, seen[step]))
    return [(place, step, nth) for place, step, nth in points
            if not step.startswith("write_at") or nth in (1, seen[step] // 2, seen[step])
            if nodes == 1 or not step.startswith("rmtree") or place > cleared]


def round_with_kill(server: Server, scenario: Scenario, trace, rank: int, point, where: Path) -> None:
    """One kill, and all that must hold after it."""
    place, step, nth = point
    done = server.run(scenario.job(where, kill=dict(rank=rank, step=[step, nth])))
    save_dir, last = where / "checkpoints", len(scenario.saves()) - 1
    assert done.exits[rank] == -9, f"not killed: exits {done.exits}\n{done.logs()}"
    survivors = [other for other in range(scenario.world) if other != rank]
    assert all(done.exits[other] == 0 for other in survivors), f"exits {done.exits}\n{done.logs()}"
    for other in survivors:
        result = done.results[other][last]
        # DeepSpeed's barrier after the commit fails on the survivors too, in torch's own way
        assert result["error"] == "CommitError" or result["committed"], f"rank {other}: {result}"
        assert result["ended"] - result["began"] < TIMEOUT + MARGIN
    judge(scenario, save_dir, *expectation(scenario, trace, rank, place))

    if not scenario.exchange:  # a save under another tag puts back what was cut off, if anything is to be put back
        assert save(server, scenario, where / "other", save_dir, "global_step3").pop(scenario.new) in (1, 2)
        shutil.rmtree(save_dir / "global_step3")
    found = save(server, scenario, where / "again", save_dir, scenario.new)
    others = {scenario.old: 1} if scenario.old not in (None, scenario.new) else {}
    assert found == {scenario.new: 3, "latest": scenario.new, **others}


def save(server: Server, scenario: Scenario, out: Path, save_dir: Path, tag: str) -> dict[str, int]:
    """New processes save version 3 without a fault, and leave nothing hidden; what is there then."""
    done = server.run(dict(out=str(out), save_dir=str(save_dir), world=scenario.world, nodes=scenario.nodes,
                           saves=[dict(tag=tag, version=3)]))
    done.expect(0, error=None)
    assert hidden(save_dir) == []
    return check(save_dir, scenario.world)


def expectation(scenario: Scenario, trace, rank: int, place: int) -> tuple[bool, bool]:
    """(may be old, may be new) after a death at this place: old until all agree, new from when rank 0 has made it so."""
    overwrites = scenario.old == scenario.new
    agreed = place > trace.index("gather save:before")
    if rank == 0:  # it publishes by itself, and before anybody else knows
        made = "exchange:after" if overwrites else "replace:after"
        about = "exchange:before" if overwrites else "replace:before"
        done = place >= trace.index(made)
        begun = place > trace.index(about)
        return not done, begun
    told = "gather publish the checkpoint directory:after" if overwrites else "gather update 'latest':after"
    return place < trace.index(told), agreed


def judge(scenario: Scenario, save_dir: Path, may_be_old: bool, may_be_new: bool) -> None:
    if not scenario.exchange and not (save_dir / scenario.new).exists():
        [aside] = save_dir.glob(f".{scenario.new}.*.old")
        assert version_in(aside, scenario.world) == 1  # the one case in which a hidden directory is needed; see exchange()
        return
    found = check(save_dir, scenario.world)
    if scenario.old == scenario.new:
        version = found[scenario.new]
        assert found == {scenario.new: version, "latest": scenario.new}
    else:
        assert found.pop(scenario.new, 2) == 2
        if scenario.old:
            assert found.pop(scenario.old) == 1
        version = 2 if found["latest"] == scenario.new else 1
        assert found == {"latest": scenario.new if version == 2 else scenario.old}
    assert version == 1 and may_be_old or version == 2 and may_be_new, f"version {version} is current"


def kill_at_all(server, scenario, rank, where, record_property, choose=lambda points: points):
    dry = dry_run(server, scenario, where)
    points = choose(kill_points(dry.traces[rank], scenario.nodes))
    record_property("steps", sorted({step for _, step, _ in points}))
    failures = []

    def kill(number):
        place = where / str(number)
        try:
            round_with_kill(server, scenario, dry.traces[rank], rank, points[number], place)
            shutil.rmtree(place)
        except Exception as err:
            failures.append(f"killed at {points[number]}: {type(err).__name__}: {err}\n({place})")
    with ThreadPoolExecutor(AT_A_TIME) as rounds:
        list(rounds.map(kill, range(len(points))))
    record_property("kills", len(points))
    assert not failures, f"{len(failures)} of {len(points)} kills:\n" + "\n".join(failures[:10])


@pytest.mark.slow
@pytest.mark.parametrize("name, world, nodes, rank", [
    ("first", 2, 1, 0), ("new_tag", 2, 1, 0), ("new_tag", 2, 1, 1), ("new_tag", 4, 1, 0), ("new_tag", 4, 1, 3),
    ("overwrite", 2, 1, 0), ("overwrite", 2, 1, 1), ("overwrite", 4, 1, 0), ("overwrite", 4, 1, 2), ("overwrite", 4, 2, 0),
    ("overwrite", 4, 2, 2), ("overwrite_without_exchange", 2, 1, 0),
    ("async_first", 2, 1, 0), ("async_new_tag", 2, 1, 0), ("async_new_tag", 4, 1, 3), ("async_overwrite", 2, 1, 0),
    ("async_overwrite", 2, 1, 1), ("async_overwrite", 4, 2, 2)])
def test_killed_at_every_step(server, tmp_path, record_property, name, world, nodes, rank):
    kill_at_all(server, Scenario(**SCENARIOS[name], world=world, nodes=nodes), rank, tmp_path, record_property)


QUICK = ["gather save:before", "write_at:midway", "publish:before", "exchange:after",
         "rmtree .global_step2.replaced.staged:midway", "replace:before", "replace:after"]


@pytest.mark.parametrize("name", ["new_tag", "overwrite", "async_overwrite"])
def test_killed_at_some_steps(server, tmp_path, record_property, name):
    def choose(points):
        return [[point for point in points if point[1] == step][-1] for step in QUICK if step in {point[1] for point in points}]
    kill_at_all(server, Scenario(**SCENARIOS[name]), 0, tmp_path, record_property, choose)
