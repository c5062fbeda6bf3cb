"""No lookup of a prompt finds a span, and clears of namespaces reach spans."""

from contextlib import AsyncExitStack

from kvhold.blend.spans import Span, span_prompt
from kvhold.core.keys import Prompt, split_hashes
from kvhold.net import messages as m
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.draw import draw_store_options
from kvhold_lab.simulation.link import SimLink
from kvhold_lab.simulation.world import World

_STORES = 0.4
_CLEARS = 0.1  # before a load


class SimSpans:
    def __init__(self, world: World) -> None:
        self._world = world

    async def operate(self, client: SimClient, prompt: Prompt) -> None:
        random, end = self._world.random, prompt.num_tokens
        cut = random.randrange(end)
        spans = [
            span_prompt(prompt, span) for span in (Span(0, cut), Span(cut, end)) if span.num_tokens
        ]
        random.shuffle(spans)
        if random.random() < _STORES:
            for span in spans:
                await self._store(client, span)
        else:
            if random.random() < _CLEARS:
                await client.clear(prompt.namespace.digest)
            await self._load(client, spans)

    async def _store(self, client: SimClient, span: Prompt) -> None:
        random, names = self._world.random, span.chunks()
        client.checker.span_names.update(
            names.namespace + chain_hash for chain_hash in split_hashes(names.hashes)
        )
        for shard in range(span.namespace.shards):
            await client.store(
                span,
                first=0,
                shard=shard,
                store_options=draw_store_options(random),
                leave=random.choice((0, 0, 0.2)),
            )

    async def _load(self, client: SimClient, spans: list[Prompt]) -> None:
        await client.register(spans[0].namespace)
        link = await client.link()
        request = m.LookupSpans(tuple(span.query() for span in spans))
        answer = await client.call(link, request, m.SpansAnswer)
        async with AsyncExitStack() as held:
            for found in answer.spans:
                if found.ticket:
                    held.push_async_callback(client.give_back, link, m.Release(found.ticket))
            until_s = self._world.now + self._world.random.choice((0.0, 0.5, 10.0))
            for span, found in zip(spans, answer.spans, strict=True):
                await self._read(client, link, span, found, until_s)

    async def _read(
        self,
        client: SimClient,
        link: SimLink,
        span: Prompt,
        found: m.LookupAnswer,
        until_s: float,
    ) -> None:
        ticket = found.ticket
        while found.arriving:
            await link.pause(0.2)
            refresh = m.Refresh(ticket, self._world.now >= until_s)
            found = await client.call(link, refresh, m.LookupAnswer)
        for shard in range(span.namespace.shards if found.ticket else 0):
            await client._read_hit(link, span, ticket, shard, num_tokens=found.num_tokens)
