"""One agent, used by Ray tasks and a Ray actor. `connect` makes the process a Ray driver of the cluster."""

import ray

from satchel.api import connect

cluster = connect()


@ray.remote
def learn(name: str, code: str) -> str:
    return connect().agent("archivist").ask_sync(f"Remember: the code of {name} is {code}.")


@ray.remote
class Examiner:
    async def ask(self, name: str) -> str:
        return await connect().agent("archivist").ask(f"What is the code of {name}?")


ray.get([learn.remote("oslo", "1624"), learn.remote("lima", "1535")])
examiner = Examiner.remote()
print(ray.get([examiner.ask.remote("oslo"), examiner.ask.remote("lima")]))
