"""``python -m decode served``: drift of a running server's acceptance from a draft's profile, as JSON lines."""

import json
import time
from pathlib import Path

from decode.bench.statistics import plain
from decode.commands.settings import ServedSettings, required
from decode.engines.server import Metrics, Server, drift
from decode.errors import UserError, read_json


def run(settings: ServedSettings) -> None:
    """Read the server's metrics, once or at an interval, and print what they say beside the profile."""
    required(settings, "url", "profile")
    path = Path(str(settings.profile))
    profile = read_json(path / "speculation_profile.json" if path.is_dir() else path)
    if not profile:
        raise UserError(f"{path} holds no speculation profile; give the draft's folder or its speculation_profile.json")
    server = Server(str(settings.url), "the server", settings.timeout)
    log = _tracker(settings.wandb)
    before: Metrics | None = None
    readings = 0
    while True:
        now = server.metrics()
        found = plain(drift(now, before, profile))
        print(json.dumps({"time": time.time(), **found}), flush=True)
        log(found)
        readings += 1
        if settings.every is None or readings == settings.readings:
            return
        before = now
        time.sleep(settings.every)


def _tracker(project: str | None):  # type: ignore[no-untyped-def]
    """What each reading is also given to: a W&B run, offline unless the user is logged in, or nothing."""
    if project is None:
        return lambda found: None
    import wandb

    run = wandb.init(project=project, job_type="served", mode="online" if wandb.api.api_key else "offline")
    return lambda found: run.log({key: value for key, value in found.items() if isinstance(value, int | float)})
