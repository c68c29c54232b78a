"""Texts that a model has written, one JSON line each.

A line counts if it is complete and agrees with its checksum, so a kill costs no more than the line being written. A
manifest beside the file names what the texts were made from; a file of another manifest is set aside.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import read_json, write_safely
from distill.files import write_json


@dataclass(frozen=True)
class Response:
    """What was written for a prompt.

    Attributes:
        example: Number of the prompt.
        ids: Token ids, with the end-of-text token where the text ended before its limit.
    """

    example: int
    ids: list[int]

    @property
    def checksum(self) -> int:
        """CRC-32 of the number and the ids."""
        return zlib.crc32(json.dumps([self.example, self.ids]).encode())


@dataclass
class ResponseFile:
    """Texts of a model on disk: the responses to a split's prompts, or samples of prompts.

    Attributes:
        path: The file (``.jsonl``); its manifest is beside it (``.json``).
        made_from: Everything that decides what is in it.
        found: The sound lines, by example.
    """

    path: Path
    made_from: dict[str, Any]
    found: dict[int, Response] = field(default_factory=dict)

    def open(self) -> None:
        """Reads the file and removes lines that are torn or altered. A file made from something else is set aside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._same():
            if self.path.exists():  # it may have taken hours
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            write_json(self.path.with_suffix(".json"), self.made_from)
        lines = self._read()
        if len(lines) != len(self.found):
            sound = [line for line in lines if _parse(line) is not None]
            write_safely(self.path, lambda file: file.write_bytes(b"".join(dict.fromkeys(sound))))

    def read(self) -> dict[int, Response]:
        """The sound lines, without changing anything; none of a file made from something else."""
        if self._same():
            self._read()
        return self.found

    def fill(self, responses: Iterable[Response], tokenizer: PreTrainedTokenizerBase) -> Iterator[Response]:
        """Writes a line at once for each response that has none yet; returns those."""
        with self.path.open("a", encoding="utf-8") as file:
            for response in responses:
                if response.example in self.found:  # written again only because its batch was
                    continue
                values = {"example": response.example, "ids": response.ids, "text": tokenizer.decode(response.ids)}
                file.write(json.dumps(values | {"crc32": response.checksum}, ensure_ascii=False) + "\n")
                file.flush()
                self.found[response.example] = response
                yield response

    def _same(self) -> bool:
        return bool(read_json(self.path.with_suffix(".json")) == self.made_from)

    def _read(self) -> list[bytes]:
        """Fills `found`; returns all lines."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        self.found = {response.example: response for response in map(_parse, lines) if response is not None}
        return lines


def _parse(line: bytes) -> Response | None:
    try:
        values = json.loads(line)
        response = Response(int(values["example"]), [int(token) for token in values["ids"]])
        return response if line.endswith(b"\n") and values["crc32"] == response.checksum else None
    except (ValueError, KeyError, TypeError):
        return None
