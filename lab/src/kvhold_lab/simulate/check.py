from kvhold_lab.simulate.replay import serve
from kvhold_lab.simulate.report import Checked, label
from kvhold_lab.simulate.simulation import Setup, replay_policy, values_of
from kvhold_lab.simulate.trace import Cut


def serve_too(cut: Cut, num_tokens: int, setup: Setup) -> Checked:
    ram = setup.ram_chunks(cut.tokens_per_chunk)
    disk = setup.disk_chunks(cut.tokens_per_chunk)
    simulated = replay_policy(
        cut, setup.policy, capacity=ram, lower_capacity=disk, values=values_of(cut, setup)
    ).found
    served = serve(
        cut,
        policy=setup.policy,
        policy_for=setup.policy_for or "tokens",
        cost=setup.cost,
        ram_chunks=ram,
        lower_chunks=disk,
    )
    simulated_rate, served_rate = (
        int(found.sum()) * cut.tokens_per_chunk / max(1, num_tokens)
        for found in (simulated, served)
    )
    return Checked(
        policy=label(setup.policy, setup.policy_for),
        ram_bytes=setup.ram_bytes,
        disk_bytes=setup.disk_bytes,
        simulated=simulated_rate,
        served=served_rate,
        same=bool((simulated == served).all()),
    )
