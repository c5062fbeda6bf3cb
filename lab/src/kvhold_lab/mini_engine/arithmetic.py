"""Arithmetic independent of batch and device.

All values are float64 multiples of a small power of two with few bits (activations and KV 17,
weights 15, attention weights 17), so sums are exact. (1 + x / 64) ** 64 and a line with two bends
replace exp and sigmoid.
"""

import torch

MAX_TOKENS = 1 << 16  # of one query
MAX_WIDTH = 1 << 12  # elements in a sum
_STEP, _BOUND = 2.0**-10, 2.0**6
_WEIGHT_STEP, _WEIGHT_BOUND = 2.0**-12, 4.0 - 2.0**-12
_ATTENTION_STEP = 2.0**-16
_ANGLE_STEP = 2.0**-14
_EPSILON = 2.0**-16


def snap(x: torch.Tensor) -> torch.Tensor:
    return (x / _STEP).round_().mul_(_STEP).clamp_(-_BOUND, _BOUND)


def snap_weight(weight: torch.Tensor) -> torch.Tensor:
    """Exact in float32, too."""
    return (
        (weight.double() / _WEIGHT_STEP)
        .round_()
        .mul_(_WEIGHT_STEP)
        .clamp_(-_WEIGHT_BOUND, _WEIGHT_BOUND)
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: `[..., in]`; weight: `[out, in]`."""
    return snap(x @ weight.T)


def normalise(x: torch.Tensor) -> torch.Tensor:
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return snap(x / (mean + _EPSILON).sqrt())


def gate(x: torch.Tensor) -> torch.Tensor:
    """SiLU, with a sigmoid of three lines."""
    return snap(x * (x / 6 + 0.5).clamp_(0, 1))


def rotation_table(num_positions: int, width: int, base: float, device: str) -> torch.Tensor:
    """[2, positions, width / 2]: cosines, sines."""
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return ((torch.stack([angles.cos(), angles.sin()]) / _ANGLE_STEP).round_() * _ANGLE_STEP).to(
        device
    )


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x: `[tokens, heads, width]`; positions: int64 `[tokens]`."""
    cosines, sines = table[:, positions, None]
    first, second = x.chunk(2, dim=-1)
    return snap(
        torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    )


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """queries: `[batch, queries, kv heads, heads of one, width]`
    keys, values: `[batch, tokens, kv heads, width]`
    mask:    bool `[batch, queries, tokens]`, with at least one token a query

    Returns `[batch, queries, kv heads, heads of one, width of values]`.
    """
    batch, num_queries, kv_heads, of_one, width = queries.shape
    seen = mask.any(1)[:, :, None, None]
    # unseen slots may hold NaN
    keys, values = (torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0))
    rows = queries.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, of_one * num_queries, width)
    scores = (rows @ keys.permute(0, 2, 3, 1)).view(batch, kv_heads, of_one, num_queries, -1)
    hidden = ~mask[:, None, None]
    scores = scores.masked_fill_(hidden, -torch.inf)
    weights = ((scores - scores.amax(-1, keepdim=True)) * (scale / 64) + 1).clamp_(min=0)
    for _ in range(6):
        weights = weights * weights
    weights = (weights / _ATTENTION_STEP).round_().mul_(_ATTENTION_STEP)
    sums = weights.view(batch, kv_heads, of_one * num_queries, -1) @ values.permute(0, 2, 1, 3)
    means = sums.view(batch, kv_heads, of_one, num_queries, -1) / weights.sum(-1, keepdim=True)
    return snap(means.permute(0, 3, 1, 2, 4))


def choose(logits: torch.Tensor) -> torch.Tensor:
    """The first of equals. logits: `[rows, tokens]`, not rounded."""
    return (
        logits
        - torch.arange(logits.shape[-1], dtype=torch.float64, device=logits.device) * 2.0**-40
    ).argmax(-1)
