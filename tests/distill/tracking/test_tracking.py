"""What is recorded, and where; a missing key makes a run offline, and W&B's mode is read and never changed."""

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import wandb
from run_report import FULL
from tiny_run import bench, tiny_settings

from distill.checks import check_inputs
from distill.results.tracking import finish, for_stage, is_offline, log_report, make_logger, tried, where


@pytest.fixture(autouse=True)
def not_logged_in(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", "/dev/null/none")  # a user without a home: all that is written lies in the run
    yield
    wandb.teardown()


def logged(run_dir: Path, key: str, run: str) -> list:
    """Values of a key in the file of the one offline run whose id ends so: JSON after its length."""
    (path,) = (run_dir / "wandb").glob(f"offline-run-*/*{run}.wandb")
    found = re.findall(key.encode() + rb"\x82\x01(.{1,64})", path.read_bytes(), re.DOTALL)
    return [json.loads(value[1 : 1 + value[0]]) for value in found]


CONFIG = {"seed": 3, "target": {"steps": 5}, "drafts": {"adaspec": {"k": 0.2}}}


def test_stages_are_offline_runs_of_a_group_with_the_same_metrics_and_the_report_is_one_more(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_TAGS", "mine")
    logger = make_logger("wandb", tmp_path, "quick", CONFIG)
    (tmp_path / "report.html").write_text("<p>the page</p>")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "weights").write_text("numbers")
    for stage in ("target", "adaspec"):
        for step in range(3):
            for_stage(logger, stage).log_metrics({"loss": 3.0 - step}, step=step)
    log_report(logger, FULL, tmp_path, upload=True)
    finish(logger)
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in where(logger)
    assert "WANDB_MODE" not in os.environ

    wandb.teardown()  # the service writes in the background until it is told to end
    for stage in ("target", "adaspec"):  # curves of two drafts have one name, and can be overlaid
        assert set(logged(tmp_path, "loss", stage)) == {3.0, 2.0, 1.0}
        assert set(logged(tmp_path, "trainer/global_step", stage)) == {0, 1, 2}
        assert (logged(tmp_path, "seed", stage), logged(tmp_path, "stage", stage)) == ([3], [stage])
    assert logged(tmp_path, "draft", "adaspec") == [{"k": 0.2}]  # a column for each setting of a draft
    written = (next((tmp_path / "wandb").glob(f"*/*{name}.wandb")).read_bytes() for name in (logger.version, "adaspec"))
    assert all(b"quick" in each and b"mine" in each for each in written)  # the group, and the tag
    assert b"quick-export" in next((tmp_path / "wandb").glob(f"*/*{logger.version}.wandb")).read_bytes()
    assert next((tmp_path / "wandb").glob("*/files/media/html/report*.html")).read_text() == "<p>the page</p>"
    # of the exported draft, greedy, where its texts are the target's, as the report's page says
    wanted = {"speedup": 1.62, "accepted_length": 4.2, "draft_length": 2.0, "offline_alpha/adaspec": 0.948}
    assert {name: logged(tmp_path, name, logger.version)[-1] for name in wanted} == wanted
    again = make_logger("wandb", tmp_path, "quick", CONFIG)  # a run that continues
    assert again.version == logger.version
    assert make_logger("wandb", tmp_path, "quick", {"seed": 4}).version != logger.version


def test_a_tracker_that_cannot_begin_offline_is_left_out_before_anything_is_trained(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(wandb, "init", Mock(side_effect=PermissionError(13, "Permission denied")))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # there is no home at all
    run, printed = bench(tiny_settings(tmp_path))
    run.logger = make_logger("wandb", run.folder, "quick", {})
    check_inputs(run)
    assert run.logger is None
    assert "this run is not tracked ([Errno 13] Permission denied); its folder holds" in printed.getvalue()


def test_a_run_is_online_with_a_key_and_otherwise_as_the_environment_says(monkeypatch, tmp_path) -> None:
    assert is_offline()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "a" * 40)
    assert not is_offline()
    key = {"WANDB_API_KEY": "a" * 40}
    for change, offline in (
        ({"WANDB_BASE_URL": "http://127.0.0.1:9"}, True),
        (key, False),
        ({"WANDB_MODE": "offline"}, True),
    ):
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        assert is_offline() == offline
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY")
    assert is_offline()  # without a key
    monkeypatch.setenv(*key.popitem())
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    logger, lines = make_logger("wandb", tmp_path, "quick", {}), list[str]()
    assert where(logger).startswith("W&B online, group quick, run")
    assert tried(logger, lines.append) is logger  # the server does not answer
    for_stage(logger, "target").log_metrics({"loss": 1.0}, step=0)
    finish(logger)
    assert lines == [f"W&B does not answer, so that the record is offline: {where(logger)}"]
    wandb.teardown()
    assert set(logged(tmp_path, "loss", "target")) == {1.0}
    assert os.environ["WANDB_MODE"] == "online"
