"""`satchel ray-env`: how Ray's own commands and programs reach the cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

from ....cluster.connection import find_cluster, is_loopback
from ....cluster.environment import ray_client_settings
from ....cluster.home import Home
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json


def ray_env(json: JsonOption = False, home: HomeOption = None) -> None:
    """Print the variables with which `ray status`, `ray memory` and your own `ray.init()` reach the cluster."""
    record = find_cluster(chosen_home(home))
    settings = ray_client_settings(Home(Path(record.home)), record.address, one_machine=is_loopback(record.address))
    if json:
        print_json(settings)
        return
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")
