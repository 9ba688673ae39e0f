"""Agents as Python handles. Each one's transcript is kept in the cluster, so any process can continue it."""

import asyncio

from satchel.api import connect


async def main():
    with connect() as cluster:
        ada = cluster.agent("ada")
        print(await ada.ask("Remember: the code of byron is 1788."))
        async for piece in ada.chat("Say the numbers from one to nine."):
            print(piece, end="", flush=True)
        print()

        async def scout(name, code):
            agent = cluster.agent(name)
            await agent.ask(f"Remember: the code of {name} is {code}.")
            return await agent.ask(f"What is the code of {name}?")

        print(await asyncio.gather(scout("gull", "1001"), scout("heron", "2002"), scout("tern", "3003")))


asyncio.run(main())
