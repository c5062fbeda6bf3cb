"""The soak of random requests: a sample of it on real engines, and what its engines' loop does with
requests that come and go.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.command import command
from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import STAGES, Ask, Question, Serve, Stage, Start, VerifyArrival

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS = list(range(10, 110))


def test_every_token_of_300_random_requests_is_that_of_an_engine_without_kvhold(
    tmp_path: Path,
) -> None:
    result = CliRunner().invoke(
        command, ["soak", "requests", "--requests", "300", "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["requests"] == 300
    assert (found["wrong"], found["errors"], found["kv_wrong"], found["kv_unknown"]) == (0, 0, 0, 0)
    assert min(found[name] for name in ("aborted", "preemptions", "hits", "evicted")) > 0
    assert found["aborted"] == sum(found["aborted_in"].values())
    assert found["loaded_tokens"] == 32 * found["kv_compared"]
    assert sum(1 for count in found["aborted_in"].values() if count) >= 4


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """An engine of 12 blocks of 32 tokens, without a connector."""
    with Engines(timeout_s=500, threads=1) as engines:
        model = {
            "model": str(make_checkpoint("llama").path),
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
        }
        small = {
            "max_model_len": 256,
            "block_size": 32,
            "num_gpu_blocks_override": 13,
            "kv_cache_memory_bytes": 1 << 26,
        }
        engines.start(
            Start(
                engine=model
                | small
                | {"max_num_batched_tokens": 32, "enable_prefix_caching": False, "max_num_seqs": 4}
            )
        )
        yield engines


def test_requests_that_arrive_while_others_run_are_answered_as_alone(engines: Engines) -> None:
    prompts = [TOKENS[number:] + TOKENS[:number] for number in range(4)]
    alone = [
        engines.ask(Ask(questions=[Question(tokens=prompt)], max_tokens=6)).token_ids[0]
        for prompt in prompts
    ]
    served = engines.serve(
        Serve(
            arrivals=[
                VerifyArrival(tokens=p, max_tokens=6, step=3 * at) for at, p in enumerate(prompts)
            ],
            margins=True,
        )
    )
    assert served.token_ids == alone
    assert served.ends == ["length"] * 4
    assert served.aborted_in == [""] * 4
    assert [len(margins) for margins in served.margins] == [6] * 4
    assert all(margin >= 0 for margins in served.margins for margin in margins)
    assert len(set(served.names)) == 4


def test_a_request_is_aborted_in_the_stage_that_was_named(engines: Engines) -> None:
    prompt = TOKENS + TOKENS[:60]  # 5 blocks, 5 steps of prefill
    whole = engines.serve(Serve(arrivals=[VerifyArrival(tokens=prompt, max_tokens=20)])).token_ids[
        0
    ]
    stages: list[Stage] = ["arrived", "prefill", "decode"]
    for stage in stages:
        served = engines.serve(
            Serve(
                arrivals=[VerifyArrival(tokens=prompt, max_tokens=20, abort=stage, abort_after=2)]
            )
        )
        assert (served.aborted_in, served.ends) == ([stage], ["abort"])
        got = served.token_ids[0]
        assert got == whole[: len(got)]
        assert (0 < len(got) < 20) == (stage == "decode")
    waiting = [
        VerifyArrival(tokens=prompt, max_tokens=20),
        *[VerifyArrival(tokens=prompt, max_tokens=20, abort="waiting") for _ in range(3)],
    ]
    served = engines.serve(Serve(arrivals=waiting))
    assert served.token_ids[0] == whole
    assert served.aborted_in[1:] == ["waiting"] * 3


def test_a_request_that_ends_before_its_stage_comes_is_served(engines: Engines) -> None:
    served = engines.serve(
        Serve(arrivals=[VerifyArrival(tokens=TOKENS, max_tokens=2, abort="preempted")])
    )
    assert (served.aborted_in, served.ends, len(served.token_ids[0])) == ([""], ["length"], 2)


def test_preemptions_are_counted(engines: Engines) -> None:
    crowd = [
        VerifyArrival(tokens=TOKENS[at:] + TOKENS[:at][:-4] + TOKENS[:22], max_tokens=40)
        for at in range(4)
    ]
    alone = [engines.serve(Serve(arrivals=[arrival])) for arrival in crowd]
    served = engines.serve(Serve(arrivals=crowd))
    assert [one.num_preemptions for one in alone] == [0] * 4
    assert served.num_preemptions > 0
    assert served.token_ids == [one.token_ids[0] for one in alone]


def test_every_stage_has_a_place_in_the_order() -> None:
    assert STAGES[0] == "arrived"
    assert (
        STAGES.index("waiting")
        < STAGES.index("loading")
        < STAGES.index("prefill")
        < STAGES.index("decode")
    )
