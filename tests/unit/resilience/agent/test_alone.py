"""The timer of an agent whose controller has gone."""

from __future__ import annotations

import asyncio

from megatron.resilience.agent.alone import AloneWatch


def test_it_is_late_again_and_again_until_a_controller_is_met() -> None:
    async def run() -> None:
        calls: list[int] = []
        thrice = asyncio.Event()

        def late() -> None:
            calls.append(len(calls))
            if len(calls) == 3:
                watch.met()
                thrice.set()

        watch = AloneWatch(0.0, late)
        watch.lost()
        watch.lost()
        await asyncio.wait_for(thrice.wait(), 30)
        for _ in range(10):  # turns of the loop, in each of which a timer of 0 s would be due
            await asyncio.sleep(0)
        assert calls == [0, 1, 2]

    asyncio.run(run())
