"""Files as people have them: encodings, compressions, tables as JSON, each read as it is meant or refused by name."""

import bz2
import gzip
import json
import lzma

import pyarrow.ipc
import pytest

from decode.bench.datasets import read_rows
from decode.errors import UserError

ROWS = [{"question": "Où?", "answer": "Là."}, {"question": "Qui?", "answer": "Toi."}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
CHAT = [{"role": "user", "content": "Où?"}, {"role": "assistant", "content": "Là."}]


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.encode("utf-8-sig")),
        ("a.jsonl", LINES.encode("utf-16")),
        ("a.jsonl", LINES.replace("\n", "\r\n\r\n").encode("utf-16-le")),
        ("a.ndjson", LINES.encode()),
        ("a.JSONL.GZ", gzip.compress(LINES.encode(), mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES.encode("utf-8-sig"))),
        ("a.jsonl.xz", lzma.compress(LINES.encode())),
        ("a.jsonl.zst", zstd(LINES.encode())),
        ("a.json", LINES.encode()),
        ("a.json", json.dumps(ROWS).encode("utf-8-sig")),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode("utf-16"), mtime=0)),
        ("a.json", json.dumps({"version": "1.1", "data": ROWS}).encode()),
        ("a.json", json.dumps(COLUMNS).encode()),
        ("a.json", json.dumps({str(n): row for n, row in enumerate(ROWS)}).encode()),
        ("a.json", json.dumps({name: dict(enumerate(column)) for name, column in COLUMNS.items()}).encode()),
        ("a.json", json.dumps({"columns": [*COLUMNS], "data": [[*row.values()] for row in ROWS]}).encode()),
        ("a.csv", "question,answer\nOù?,Là.\nQui?,Toi.\n".encode("utf-8-sig")),
        ("a.csv.gz", gzip.compress("question,answer\nOù?,Là.\nQui?,Toi.\n".encode(), mtime=0)),
        ("a.tsv", "question\tanswer\r\nOù?\tLà.\r\nQui?\tToi.\r\n".encode("utf-16")),
    ],
)
def test_a_file_is_read_in_the_encoding_and_the_form_it_has(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_rows(tmp_path / name) == ROWS


@pytest.mark.parametrize("write", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_both_kinds_of_arrow_files_are_read(tmp_path, write):
    table = pyarrow.Table.from_pylist(ROWS)
    with write(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    assert read_rows(tmp_path / "a.arrow") == ROWS


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ({"messages": CHAT}, [{"messages": CHAT}]),
        ({"messages": [CHAT, CHAT]}, [{"messages": CHAT}] * 2),
        ({"prompt": ["a", "b"], "meta": [{"n": 1}, {"n": 2}]}, [{"prompt": "a", "meta": {"n": 1}}, {"prompt": "b", "meta": {"n": 2}}]),
        ({"prompt": "a", "tags": ["x"]}, [{"prompt": "a", "tags": ["x"]}]),
        ({"train": ROWS, "test": ROWS}, [{"train": ROWS, "test": ROWS}]),
        ({"one": ROWS[0], "two": ROWS[1]}, [{"one": ROWS[0], "two": ROWS[1]}]),
    ],
)  # fmt: skip
def test_an_object_whose_rows_are_not_plain_stays_one_row(tmp_path, content, rows):
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert read_rows(tmp_path / "a.json") == rows


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", LINES.encode("latin-1"), "line 1: its character 16, the byte 0xf9"),
        ("a.jsonl", b'{"q": "a"}\n{"q": "caf\xe9"}\n{"q": "b"}\n', r"line 2: .* the byte 0xe9, is not UTF-8; .*iconv"),
        ("a.csv", b"q\na\ncaf\xe9\n", "line 3: .* the byte 0xe9"),
        ("a.txt", b"a\n\ncaf\xe9\n", "line 3: .* the byte 0xe9"),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 99, mtime=0)[:-9], "cannot be read: Truncated"),
        ("a.jsonl.xz", lzma.compress(LINES.encode() * 99)[:-9], "cannot be read: Compressed file ended"),
        ("a.jsonl.gz", LINES.encode(), "cannot be read: .*header"),
        ("a.csv", b"question,answer\nWhy?,Yes, so\n", "near row 1: its 3 fields are not those of"),
        ("a.csv", b"question,answer,answer\nWhy?,Yes,No\n", "near row 1: its 2 fields are not those of"),
        ("a.csv", b'question,answer\n"Why?,So\n', "near row 1: unexpected end of data"),
        ("a.json", b'"text"', "named columns"),
        ("a.jsonl", b'{"a": 1}\n\n["b"]', "near row 2: .*named columns"),
        ("a.json", b'[{"a": 1}', "near row 1: Expecting ',' delimiter"),
        ("a.xlsx.gz", b"", r"ends in '.gz': rows are read from .csv, .tsv"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_rows(tmp_path / name)
