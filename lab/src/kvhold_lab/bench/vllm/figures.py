"""From cells to rows: medians, and ratios within cells. No I/O, no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvhold_lab.bench.ratios import Cell, Goal, Ratio, rates_of, ratio, seconds_of, shared
from kvhold_lab.bench.vllm.systems import (
    AGAIN,
    BESIDE,
    KVHOLD,
    LAYERWISE,
    LEFT_AGAIN,
    LEFT_ALONE,
    LIMIT,
    OFFLOADING,
    PLAIN,
    SYSTEMS,
    UNCHECKED,
)


@dataclass(frozen=True)
class VllmRow:
    """One system at one share of reuse.

    throughput: tokens of prompts and outputs a second, in bursts
    ratio_to_best_peer: of TTFT; the limit is no peer
    cached_tokens: of the shortest hit
    ttft_ratios, throughput_ratios, cpu_ratios: to each other system
    """

    reuse: int
    system: str
    ttft_p50_s: float
    ttft_p99_s: float
    throughput: float | None
    ratio_to_best_peer: float
    best_peer: str
    cached_tokens: int
    requests: int
    ttft_ratios: dict[str, Ratio]
    throughput_ratios: dict[str, Ratio]
    cpu_ratios: dict[str, Ratio]


def make_rows(cells: Sequence[Cell]) -> list[VllmRow]:
    rows = []
    for reuse in sorted({cell.reuse for cell in cells}):
        alone = [cell for cell in cells if cell.reuse == reuse and not cell.burst]
        bursts = [cell for cell in cells if cell.reuse == reuse and cell.burst]
        names = list(
            dict.fromkeys(
                name for cell in alone for name in sorted(cell.seconds, key=SYSTEMS.index)
            )
        )
        medians = {name: float(np.median(seconds_of(alone, name))) for name in names}
        for name in names:
            others = [other for other in names if other != name and shared(alone, name, other)]
            ttft_ratios = {other: ratio(alone, name, other) for other in others}
            peers = [
                other
                for other in others
                if other not in (LIMIT, AGAIN, LEFT_ALONE, LEFT_AGAIN, UNCHECKED)
            ]
            best = min(peers, key=medians.__getitem__)
            rates = rates_of(bursts, name)
            rows.append(
                VllmRow(
                    reuse=reuse,
                    system=name,
                    ttft_p50_s=medians[name],
                    ttft_p99_s=float(np.percentile(seconds_of(alone, name), 99)),
                    throughput=float(np.median(rates)) if rates else None,
                    ratio_to_best_peer=ttft_ratios[best].median,
                    best_peer=best,
                    cached_tokens=min(
                        cell.cached_tokens[name] for cell in alone if name in cell.seconds
                    ),
                    requests=len(seconds_of(alone, name)),
                    ttft_ratios=ttft_ratios,
                    throughput_ratios={
                        other: ratio(bursts, other, name)
                        for other in others
                        if shared(bursts, name, other)
                    },
                    cpu_ratios={
                        other: ratio(bursts, name, other, "cpu_s")
                        for other in others
                        if shared(bursts, name, other)
                    },
                )
            )
    return rows


def goals(rows: Sequence[VllmRow]) -> list[Goal]:
    found = []
    control = next((row for row in rows if row.system == AGAIN), None)
    of_ttft = control.ttft_ratios[PLAIN].apart if control is not None else 1.0
    of_work = control.throughput_ratios[PLAIN].apart if control is not None else 1.0
    of_cpu = control.cpu_ratios[PLAIN].apart if control is not None else 1.0
    within = next((row for row in rows if row.system == LEFT_AGAIN), None)
    for row in rows:
        if row.system == LAYERWISE:
            found.append(
                Goal(
                    f"{row.reuse} % reuse, layer by layer: TTFT over that of loads beside "
                    "the passes",
                    row.ttft_ratios[BESIDE],
                    1.0,
                )
            )
        if row.system != KVHOLD:
            continue
        ttft = row.ttft_ratios
        if row.reuse == 0:
            found.append(
                Goal("no reuse: TTFT over vLLM's without a connector", ttft[PLAIN], 1.02, of_ttft)
            )
            slower = row.throughput_ratios[PLAIN].inverse
            found.append(
                Goal(
                    "no reuse: time for the same work over vLLM's without a connector",
                    slower,
                    1.02,
                    of_work,
                )
            )
            found.append(
                Goal("no reuse: CPU time for it, beside that", row.cpu_ratios[PLAIN], 1.02, of_cpu)
            )
            if within is not None:
                what = "no reuse: {} over that of requests left alone, in one engine"
                slower = row.throughput_ratios[LEFT_ALONE].inverse
                found.append(
                    Goal(
                        what.format("TTFT"),
                        ttft[LEFT_ALONE],
                        1.02,
                        within.ttft_ratios[LEFT_ALONE].apart,
                    )
                )
                found.append(
                    Goal(
                        what.format("time"),
                        slower,
                        1.02,
                        within.throughput_ratios[LEFT_ALONE].apart,
                    )
                )
        elif OFFLOADING in ttft:
            found.append(
                Goal(
                    f"{row.reuse} % reuse: TTFT over vLLM's offloading's",
                    ttft[OFFLOADING],
                    1.0,
                    of_ttft,
                )
            )
        if row.reuse == 100:
            found.append(
                Goal(
                    "full hit: TTFT over that of vLLM's own prefix cache", ttft[LIMIT], 1.1, of_ttft
                )
            )
            if UNCHECKED in ttft:
                found.append(
                    Goal(
                        "full hit: TTFT over that without comparing checksums",
                        ttft[UNCHECKED],
                        1.03,
                        of_ttft,
                    )
                )
    return found
