"""The simulation beside a real cache."""

from kvhold_lab.simulate.replay import serve
from kvhold_lab.simulate.report import Checked
from kvhold_lab.simulate.simulation import Setup, replay_policy
from kvhold_lab.simulate.trace import Cut


def serve_too(cut: Cut, num_tokens: int, setup: Setup) -> Checked:
    ram = setup.ram_chunks(cut.tokens_per_chunk)
    disk = setup.disk_chunks(cut.tokens_per_chunk)
    simulated = replay_policy(cut, setup.policy, capacity=ram, lower_capacity=disk).found
    served = serve(cut, policy=setup.policy, ram_chunks=ram, lower_chunks=disk)
    simulated_rate, served_rate = (
        int(found.sum()) * cut.tokens_per_chunk / max(1, num_tokens)
        for found in (simulated, served)
    )
    return Checked(
        policy=setup.policy,
        ram_bytes=setup.ram_bytes,
        disk_bytes=setup.disk_bytes,
        simulated=simulated_rate,
        served=served_rate,
        same=bool((simulated == served).all()),
    )
