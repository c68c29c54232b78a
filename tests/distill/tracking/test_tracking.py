"""What is recorded, and where; neither a missing network nor a refused key stops a run."""

import csv
import http.server
import json
import os
import struct
import threading
from collections import defaultdict
from pathlib import Path

import lightning
import pytest
import torch

from decode.errors import UserError
from distill import tracking
from distill.config.run import TrackerSettings
from distill.tracking import finish, for_stage, log_draft, log_report, make_logger, wandb_mode, where


def decoded(draft: str, length: int, speedup: float, **more: object) -> dict[str, object]:
    row = {"draft": draft, "draft_length": length, "speedup": speedup, "temperature": 0.0, "identical_to_target": True}
    return row | more


REPORT = {
    "target": {"accuracy": 0.62},
    "drafts": [
        {"name": "distillspec", "offline_alpha": 0.91},
        {"name": "adaspec", "offline_alpha": 0.93, "curve": [1, 2]},
    ],
    "profile": {"draft": "adaspec"},
    "decoding": [
        decoded("adaspec", 6, 1.6, accepted_length=3.5),
        decoded("adaspec", 9, 2.0, identical_to_target=False),
        decoded("adaspec", 9, 1.9, temperature=1.0),
        decoded("distillspec", 6, 1.8),
    ],
}


@pytest.fixture(autouse=True)
def not_logged_in(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    yield
    import wandb

    wandb.teardown()


def log_entries(data: bytes):
    """Entries of a LevelDB log: blocks of 32 KiB; chunks of crc[4] length[2] type[1]; after a file header."""
    position, entry = 7, b""
    while position + 7 <= len(data):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def records(run_dir: Path) -> dict:
    """What the offline runs below `run_dir` hold, by kind; history rows as dicts."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # the service writes in the background until it is told to end
    found = defaultdict(list)
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for entry in log_entries(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            kind = record.WhichOneof("record_type")
            value = getattr(record, kind)
            if kind == "history":
                value = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in value.item}
            found[kind].append(value)
    return found


def test_stages_share_one_offline_run_under_their_own_names(tmp_path):
    logger = make_logger(TrackerSettings(), tmp_path, "quick", {"seed": 3, "target": {"steps": 5}})
    for_stage(logger, "target").log_metrics({"loss": 2.0}, step=500)
    for_stage(logger, "draft").log_metrics({"loss": 1.0, "alpha": 0.9}, step=10)
    finish(logger)

    found = records(tmp_path)
    assert len(found["run"]) == 1
    config = {item.key: json.loads(item.value_json) for item in found["run"][0].config.update}
    assert config["seed"] == 3
    assert config["target"] == {"steps": 5}
    rows = found["history"]
    assert (rows[0]["target/loss"], rows[0]["trainer/global_step"]) == (2.0, 500)
    assert (rows[1]["draft/alpha"], rows[1]["trainer/global_step"]) == (0.9, 10)
    assert ("*", "trainer/global_step") in {(metric.glob_name, metric.step_metric) for metric in found["metric"]}


def test_a_continued_run_keeps_its_id_and_changed_settings_get_a_new_one(tmp_path):
    first = make_logger(TrackerSettings(), tmp_path, "quick", {"seed": 3})
    for_stage(first, "target").log_metrics({"loss": 2.0}, step=1)
    finish(first)
    again = make_logger(TrackerSettings(), tmp_path, "quick", {"seed": 3})
    for_stage(again, "target").log_metrics({"loss": 1.0}, step=2)
    finish(again)
    other = make_logger(TrackerSettings(), tmp_path, "quick", {"seed": 4})

    assert first.version == again.version
    assert {run.run_id for run in records(tmp_path)["run"]} == {first.version}
    assert other.version != first.version


def test_the_report_is_recorded_as_tables_plots_and_summary(tmp_path):
    logger = make_logger(TrackerSettings(), tmp_path, "quick", {})
    log_report(logger, REPORT, lambda: {"speedup": "<svg xmlns='http://www.w3.org/2000/svg'></svg>"})
    finish(logger)

    found = records(tmp_path)
    table = next((tmp_path / "wandb").glob("*/files/media/table/tables/drafts*.json"))
    assert json.loads(table.read_text())["data"][1] == ["adaspec", 0.93, "[1, 2]"]
    assert next((tmp_path / "wandb").glob("*/files/media/html/plots/*.html")).read_text().startswith("<svg")
    assert any(key.startswith("plots/speedup") for row in found["history"] for key in row)
    summary = {i.key: json.loads(i.value_json) for s in found["summary"] for i in s.update}
    # of the exported draft, greedy, where its texts are the target's, as the report's page says
    assert [summary[name] for name in ("speedup", "accepted_length", "draft_length")] == [1.6, 3.5, 6.0]
    assert summary["offline_alpha/adaspec"] == 0.93


def test_online_without_a_key_is_refused_with_the_next_step(tmp_path):
    with pytest.raises(UserError, match="wandb login"):
        make_logger(TrackerSettings(mode="online"), tmp_path, "quick", {})


def test_csv_keeps_the_metrics_of_a_killed_run_when_it_is_continued(tmp_path):
    for start in range(2):
        logger = make_logger(TrackerSettings(kind="csv"), tmp_path, "quick", {"seed": 3})
        stage = for_stage(logger, "draft")
        stage.log_metrics({"loss": 2.0 - start}, step=start)
        stage.save()
    losses = []
    for path in sorted(tmp_path.glob("csv/draft/*/metrics.csv")):
        losses += [float(row["loss"]) for row in csv.DictReader(path.open())]
    assert losses == [2.0, 1.0]


def test_csv_and_tensorboard_take_the_whole_report(tmp_path):
    pytest.importorskip("tensorboard")
    for kind in ("csv", "tensorboard"):
        logger = make_logger(TrackerSettings(kind=kind), tmp_path, "quick", {"seed": 3})
        log_report(logger, REPORT, dict)
        finish(logger)
        assert kind in where(logger)
    row = next(csv.DictReader(next(tmp_path.glob("csv/run/*/metrics.csv")).open()))
    assert float(row["speedup"]) == 1.6
    assert list((tmp_path / "tensorboard").rglob("events.out.*"))


def test_a_draft_is_read_in_place_when_it_is_uploaded(tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(os.urandom(1 << 20))
    logger = make_logger(TrackerSettings(), tmp_path, "quick", {})
    log_draft(logger, draft)
    finish(logger)

    artifact = records(tmp_path)["artifact"][0]
    assert artifact.type == "model"
    assert [Path(e.local_path) for e in artifact.manifest.contents] == [draft / "model.safetensors"]
    copied = sum(p.stat().st_size for p in (tmp_path / "wandb").rglob("*") if p.is_file())
    assert copied < 1 << 19


def test_settings_win_over_the_environment_and_without_a_key_a_run_is_offline(monkeypatch):
    monkeypatch.setattr(tracking, "accepted", lambda *_: True)
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert wandb_mode("auto") == "online"
    assert wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"


@pytest.mark.parametrize("reply", [200, 401, None])
def test_a_run_is_online_only_if_the_server_accepts_the_key(monkeypatch, tmp_path, reply):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Authorization"].startswith("Basic ")
            self.send_response(reply)
            self.end_headers()
            self.wfile.write(b'{"data": {"viewer": {"id": "x"}}}')

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    url = f"http://127.0.0.1:{server.server_port if reply else 9}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {url.removeprefix('http://')} login user password {'a' * 40}")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_BASE_URL", url)
    try:
        assert wandb_mode("auto") == ("online" if reply == 200 else "offline")
    finally:
        server.shutdown()
        server.server_close()


class Tiny(lightning.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_trainers_of_two_stages_log_into_the_same_run(tmp_path):
    logger = make_logger(TrackerSettings(), tmp_path, "quick", {})
    for stage in ("target", "draft"):
        trainer = lightning.Trainer(
            max_steps=3, log_every_n_steps=1, accelerator="cpu", logger=for_stage(logger, stage),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Tiny(), torch.ones(4, 2))
    finish(logger)

    found = records(tmp_path)
    assert len(found["run"]) == 1
    for stage in ("target", "draft"):
        assert [row["trainer/global_step"] for row in found["history"] if f"{stage}/loss" in row] == [0, 1, 2]
