import json

import pytest

from decode.__main__ import main
from decode.bench.compare_runs import find_rows
from decode.errors import UserError

ROW = {"name": "vanilla", "suite": "s", "temperature": 0.0, "speedup": 2.0, "lossless": True, "baseline": False}


def test_rows_of_all_runs_stand_in_one_table(tmp_path, capsys):
    for run, speedup in (("a", 2.0), ("b", 3.5)):
        (tmp_path / run).mkdir()
        report = {"decoding": [ROW | {"speedup": speedup}, ROW | {"name": "none", "speedup": None}], "drafts": [{}]}
        (tmp_path / run / "report.json").write_text(json.dumps(report))
    assert [(row["run"], row["speedup"]) for row in find_rows([str(tmp_path)])] == [("a", 2.0), ("b", 3.5)]
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["b", "a"]
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match=r"no report\.json with measured methods"):
        find_rows([str(tmp_path / "c")])
