"""`kvhold bench sessions` in small."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold_lab.bench.sessions.run import SessionsSizes, measure
from kvhold_lab.bench.sessions.workload import OUTPUT, VOCAB, Agents

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = SessionsSizes(agents=2, turns=14, other_bytes=4 << 20)


def test_superseded_turns_leave_memory_to_others(tmp_path: Path, notes: None) -> None:
    retain, answers = measure("retain", 64 << 20, SIZES, tmp_path)
    assert (retain.ok, retain.refused_hints) == (True, 0)
    sessions, others = measure("sessions", 64 << 20, SIZES, tmp_path)
    assert (sessions.ok, sessions.refused_hints) == (True, 0)
    assert sessions.peak_retained_bytes < 0.75 * retain.peak_retained_bytes
    none, without = measure("no hints", 4 << 20, SIZES, tmp_path)
    assert (none.ok, none.peak_retained_bytes) == (False, 0), "the others evict"
    assert answers == others == without


def test_possible_hits_are_tokens_of_earlier_requests() -> None:
    agents, rng = Agents(3, 20), random.Random(1)
    seen: dict[str, list[list[int]]] = {}
    names = set()
    while not agents.are_over:
        for agent, turn in agents.acting():
            names.add(turn.session)
            parent = turn.session.partition(".")[0]
            earlier = [one for name in {parent, turn.session} for one in seen.get(name, [])]
            shared = [one[: turn.possible] == turn.prompt[: turn.possible] for one in earlier]
            assert any(shared) == bool(turn.possible)
            assert turn.possible < len(turn.prompt)
            output = [rng.randrange(VOCAB) for _ in range(OUTPUT)]
            seen.setdefault(turn.session, []).append(turn.prompt + output)
            agent.answered(turn, output)
    assert any("." in name for name in names), "there are subagents"
