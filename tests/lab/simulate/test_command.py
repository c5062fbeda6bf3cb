"""`kvhold simulate`: its rows, its comparison with a real cache, its picture, and how
it refuses.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("numba", reason="no numba in this environment")

from kvhold.cli import cli
from kvhold.core.errors import ConfigError
from kvhold_lab.simulate import check, command, numba_eviction
from kvhold_lab.simulate.generators import GENERATORS
from kvhold_lab.simulate.simulation import replay_policy
from tests.lab.simulate.traces import make_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(make_trace(sessions=30, turns=4)))
    return path


@pytest.fixture
def untimed(trace: Path) -> Path:
    path = trace.with_name("untimed.jsonl")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    del lines[7]["timestamp"]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def simulate(trace: Path | None, *arguments: str) -> Result:
    named = [] if trace is None else [str(trace)]
    result = CliRunner().invoke(cli, ["simulate", *named, *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


def rows(trace: Path, *arguments: str) -> list[dict[str, Any]]:
    result = simulate(trace, *arguments, "--json", str(trace.with_name("rows.json")))
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(trace.with_name("rows.json").read_text())
    return found


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--json", "nowhere/rows.json", "there is no folder"),
        ("--plot", "nowhere/hits.png", "there is no folder"),
        ("--plot", "hits.xyz", "its name must end in one of .png, .svg, .pdf"),
        ("--json", ".", "is a directory"),
    ],
)
def test_where_nothing_can_be_written_is_known_before_the_run(
    trace: Path, option: str, name: str, message: str
) -> None:
    result = simulate(trace, option, str(trace.parent / name))
    assert result.exit_code == 2 and message in result.output and "requests" not in result.output


def test_what_is_not_counted_of_a_model_is_said(trace: Path) -> None:
    shown = simulate(
        trace,
        "--model",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "--policy",
        "lru",
        "--capacity",
        "1GiB",
    ).output
    assert (
        "Qwen/Qwen3-Next-80B-A3B-Instruct: 36 layers keep a state, whose size is not known" in shown
    )


def test_a_row_for_each_combination(trace: Path) -> None:
    found = rows(
        trace,
        *(
            "--policy",
            "lru",
            "--policy",
            "belady",
            "--capacity",
            "4GiB",
            "--capacity",
            "8GiB",
            "--disk",
            "16GiB",
        ),
        *(
            "--chunk-tokens",
            "256",
            "--chunk-tokens",
            "1024",
            "--codec",
            "raw",
            "--codec",
            "int8",
            "--bytes-per-token",
            "131072",
        ),
    )
    names = ("policy", "capacity_bytes", "disk_bytes", "chunk_tokens", "codec")
    assert len({tuple(row[name] for name in names) for row in found}) == len(found) == 16


def test_rates_and_bytes_agree_with_each_other(trace: Path) -> None:
    for row in rows(trace, "--capacity", "4GiB", "--disk", "8GiB", "--codec", "int8"):
        assert row["hit_rate"] == pytest.approx(row["ram_hit_rate"] + row["disk_hit_rate"])
        assert 0 < row["hit_rate"] < 1 and row["hit_rate"] <= row["request_hit_rate"] <= 1
        assert row["bytes_read"] % (512 * 131_072) == 0
        assert row["disk_bytes_read"] <= row["bytes_read"] and row["events_per_s"] > 0


def test_more_memory_finds_no_less_and_nothing_more_than_the_bound(trace: Path) -> None:
    found = rows(trace)
    bound = {row["capacity_bytes"]: row["hit_rate"] for row in found if row["policy"] == "belady"}
    assert list(bound.values()) == sorted(bound.values())
    assert all(row["hit_rate"] <= bound[row["capacity_bytes"]] for row in found)
    assert len({row["hit_rate"] for row in found if row["capacity_bytes"] == max(bound)}) == 1, (
        "where all fits, policies are alike"
    )


def test_a_model_says_how_large_a_token_is(trace: Path) -> None:
    [of_name] = rows(
        trace, "--model", "Qwen/Qwen2.5-7B-Instruct", "--policy", "lru", "--capacity", "1GiB"
    )
    [of_bytes] = rows(trace, "--bytes-per-token", "57344", "--policy", "lru", "--capacity", "1GiB")
    assert of_name | {"events_per_s": 0} == of_bytes | {"events_per_s": 0}


@pytest.mark.parametrize("policy", [*numba_eviction.POLICIES, "learned"])
@pytest.mark.parametrize("disk", ["0", "8GiB"])
def test_a_row_counts_what_hits_save_and_what_they_cost(
    trace: Path, policy: str, disk: str
) -> None:
    sizes = ("--capacity", "4GiB", "--disk", disk, "--bytes-per-token", "131072")
    speed = ("--prefill-tokens-per-s", "1000", "--attention-tokens")
    [row] = rows(trace, "--policy", policy, *sizes, *speed, "inf")
    requests = [json.loads(line) for line in trace.read_text().splitlines()]
    num_tokens = sum(request["input_length"] for request in requests)
    assert row["hit_tokens"] % 512 == 0
    assert row["hit_tokens"] / num_tokens == pytest.approx(row["hit_rate"])
    assert row["hit_requests"] / len(requests) == pytest.approx(row["request_hit_rate"])
    assert row["saved_s"] == pytest.approx(row["hit_tokens"] / 1000), "without attention"
    assert row["evicted"] == row["evictions"] > 0
    assert row["written_bytes"] == row["disk_bytes_written"]
    assert bool(row["written_bytes"]) == (disk != "0" and policy != "belady")
    [with_attention] = rows(trace, "--policy", policy, *sizes, *speed, "4096")
    assert with_attention["saved_s"] > 1.1 * row["saved_s"]
    assert with_attention["hit_tokens"] == row["hit_tokens"]


def test_learned_is_one_of_the_policies_if_all_requests_have_a_time(
    trace: Path, untimed: Path
) -> None:
    timed, without = rows(trace, "--capacity", "4GiB"), rows(untimed, "--capacity", "4GiB")
    assert [row["policy"] for row in timed] == list(command._POLICIES)
    assert [row["policy"] for row in without] == [
        name for name in command._POLICIES if name != "learned"
    ]
    assert "without learned, which needs a timestamp in each line" in simulate(untimed).output


def test_what_learned_maximises_is_an_option_and_a_field(trace: Path) -> None:
    sizes = ("--capacity", "2GiB", "--bytes-per-token", "131072", "--attention-tokens", "2000")
    policies = ("--policy", "lru", "--policy", "learned")
    aims = [word for aim in ("tokens", "ttft", "bytes") for word in ("--policy-for", aim)]
    found = rows(trace, *sizes, *policies, *aims, "--check")
    assert [(row["policy"], row["policy_for"]) for row in found] == [
        ("lru", ""),
        ("learned", "tokens"),
        ("learned", "ttft"),
        ("learned", "bytes"),
    ]
    tokens, ttft, nbytes = ({**row, "policy_for": "", "events_per_s": 0} for row in found[1:])
    assert tokens == nbytes != ttft
    [default] = rows(trace, *sizes, "--policy", "learned")
    assert default["policy_for"] == "tokens"
    assert default["hit_tokens"] == tokens["hit_tokens"]


def test_seconds_count_more_than_tokens_for_ttft(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ("--workload", "documents", "--minutes", "15", "--capacity", "32GiB")
    aims = ("--policy", "learned", "--policy-for", "tokens", "--policy-for", "ttft")
    simulate(None, *arguments, *aims, "--attention-tokens", "1000", "--json", str(file))
    tokens, ttft = json.loads(file.read_text())
    assert ttft["saved_s"] / ttft["hit_tokens"] > 1.02 * tokens["saved_s"] / tokens["hit_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "lru", "--policy-for", "ttft"), "add --policy learned"),
        (("--policy", "learned", "--policy-for", "seconds"), "'seconds' is not one of"),
        (
            ("--policy", "learned", "--policy-for", "ttft", "--check", "--disk", "1GiB"),
            "cannot check --policy-for ttft",
        ),
    ],
)
def test_what_cannot_be_maximised_or_checked_is_a_mistake(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    shown = simulate(trace, *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_learned_without_times_is_refused_if_it_is_named(
    untimed: Path, check: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="give each line of the trace a timestamp"):
        simulate(untimed, "--policy", "learned", "--capacity", "4GiB", *check)


@pytest.mark.parametrize("workload", GENERATORS)
def test_a_workload_is_made_instead_of_a_trace(tmp_path: Path, workload: str) -> None:
    file = tmp_path / "rows.json"
    arguments = ("--workload", workload, "--minutes", "1", "--capacity", "4GiB", "--policy", "lru")
    found = []
    for seed in ("1", "1", "2"):
        result = simulate(None, *arguments, "--seed", seed, "--json", str(file))
        assert result.exit_code == 0, result.output
        [row] = json.loads(file.read_text())
        found.append((result.output.splitlines()[0], row["hit_tokens"], row["evicted"]))
    assert found[0] == found[1] != found[2]


def test_a_loop_larger_than_memory_is_what_the_least_recently_used_never_finds(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.json"
    arguments = ("--workload", "loop", "--minutes", "10", "--capacity", "64GiB")
    policies = ("--policy", "lru", "--policy", "learned", "--policy", "belady")
    simulate(None, *arguments, *policies, "--json", str(file))
    found = {row["policy"]: row["hit_rate"] for row in json.loads(file.read_text())}
    assert found["lru"] == 0 and 0.2 < found["learned"] <= found["belady"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("TRACE", "--workload", "loop"), "name either a TRACE or a --workload, and not both"),
        ((), "name either a TRACE or a --workload, and not both"),
        (("TRACE", "--seed", "1"), "--seed and --minutes need a --workload"),
        (("TRACE", "--minutes", "1"), "--seed and --minutes need a --workload"),
        (("--workload", "loop", "--block-tokens", "16"), "--block-tokens is 512 for a --workload"),
        (("--workload", "nothing"), "'nothing' is not one of"),
    ],
)
def test_either_a_trace_or_a_workload(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    named = [str(trace) if each == "TRACE" else each for each in arguments]
    result = simulate(None, *named)
    assert result.exit_code == 2 and message in result.output


def test_a_real_cache_with_a_real_disk_finds_the_same(trace: Path) -> None:
    sizes = ("--capacity", "2GiB", "--disk", "2GiB", "--bytes-per-token", "131072")
    shown = simulate(
        trace, "--check", *sizes, "--requests", "60", "--policy", "learned", "--policy", "lfu"
    )
    assert shown.exit_code == 0, shown.output
    table = shown.stdout[shown.stdout.index("real cache") :]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["learned", "lfu"]
    assert table.count("the same") == 2


def test_a_simulation_that_is_wrong_by_a_tenth_of_a_point_fails(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*arguments: Any, **others: Any) -> Any:
        replayed = replay_policy(*arguments, **others)
        replayed.found[-1, 0] += 1  # of some 700 chunks
        return replayed

    monkeypatch.setattr(check, "replay_policy", too_much)
    shown = simulate(trace, "--check", "--capacity", "4GiB", "--policy", "lru")
    assert shown.exit_code == 1 and "differs" in shown.output


def test_a_real_cache_finds_the_same(trace: Path) -> None:
    shown = simulate(trace, "--check", "--capacity", "8GiB", "--requests", "60")
    assert shown.exit_code == 0, shown.output
    table = shown.stdout[shown.stdout.index("real cache") :]
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        "lru",
        "lfu",
        "fifo",
        "mru",
        "s3fifo",
        "learned",
    ]
    assert table.count("the same") == 6


def test_a_picture_is_drawn(trace: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = trace.with_suffix(".png")
    simulate(
        trace,
        "--policy",
        "lru",
        "--policy",
        "belady",
        "--disk",
        "0",
        "--disk",
        "8GiB",
        "--plot",
        str(picture),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_class_of_your_own_is_replayed(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace.with_name("my_policies.py").write_text(
        "from kvhold.tiers.policies import LruPolicy\n\n\nclass MyPolicy(LruPolicy):\n    pass\n"
    )
    monkeypatch.syspath_prepend(trace.parent)
    own, named = rows(
        trace,
        *("--policy", "my_policies:MyPolicy", "--policy", "lru"),
        *("--capacity", "4GiB", "--disk", "8GiB"),
    )
    assert own.pop("policy") == "my_policies:MyPolicy" and named.pop("policy") == "lru"
    assert own | {"events_per_s": 0} == named | {"events_per_s": 0}
    assert own["disk_evictions"] > 0


def test_a_class_of_your_own_is_drawn(trace: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = trace.with_suffix(".svg")
    shown = simulate(
        trace,
        *("--policy", "kvhold.tiers.policies:LruPolicy", "--requests", "20"),
        *("--plot", str(picture)),
    )
    assert shown.exit_code == 0, shown.output
    assert "\nLruPolicy " in shown.output and ">LruPolicy<" in picture.read_text()


def test_an_unknown_policy_is_a_mistake(trace: Path) -> None:
    result = simulate(trace, "--policy", "lri")
    assert result.exit_code == 2
    assert "'lri' is neither module:Class nor one of lru, " in result.output


def test_every_policy_that_is_compiled_can_be_named() -> None:
    assert set(command._POLICIES) >= set(numba_eviction.POLICIES)


def test_a_codec_without_a_tier_is_a_mistake(trace: Path) -> None:
    result = simulate(trace, "--codec", "int8")
    assert result.exit_code == 2
    assert "add that tier with --disk" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chunk-tokens", "100"), "chunk_tokens is 100; it must divide the trace's block of 512"),
        (("--block-tokens", "16"), r"trace\.jsonl, line 1: hash_ids has .* set block_tokens"),
        (("--bytes-per-token", "0"), "bytes_per_token is 0"),
        (("--dtype", "fp8", "--codec", "int8", "--disk", "1GiB"), "for float8_e4m3fn use raw"),
        (("--model", "nobody/nothing"), "no model of that name is known"),
        (("--policy", "nowhere:MyPolicy"), "policy is nowhere:MyPolicy, which cannot be imported"),
        (("--policy", "kvhold.tiers.policies:Nobody"), "which cannot be imported: .* 'Nobody'"),
        (("--policy", "kvhold.tiers.policies:__all__"), "which is not a class"),
    ],
)
def test_bad_input_is_named(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(trace, *arguments)
