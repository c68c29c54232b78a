"""Texts that a model has written, one JSON line each.

A line counts if it is complete and agrees with its checksum, so a kill costs no more than the line being written. A
manifest beside the file names what the texts were made from; a file of another manifest is set aside, and one of the
same manifest is taken over from another run.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import read_json
from distill.files import write_json

Response = tuple[int, list[int]]
"""Number of a prompt, and the token ids written for it, with the end token if the text ended before its limit."""


@dataclass
class ResponseFile:
    """Texts of a model on disk: the responses to a split's prompts, or samples of prompts.

    Attributes:
        path: The file (``.jsonl``); its manifest is beside it (``.json``).
        made_from: Everything that decides what is in it.
        found: Token ids of the sound lines, by the number of the prompt.
    """

    path: Path
    made_from: dict[str, Any]
    found: dict[int, list[int]] = field(default_factory=dict)

    def open(self) -> None:
        """Reads the file and removes a torn last line. A file made from something else is set aside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if read_json(self.path.with_suffix(".json")) != self.made_from:
            if self.path.exists():  # it may have taken hours
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            write_json(self.path.with_suffix(".json"), self.made_from)
        if not self.path.exists():
            self._take_over()
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self.read()

    def _take_over(self) -> None:
        """Copies the texts that another run beside this one (``runs/<name>/work/<folder>``) made from the same."""
        place = Path("*", *self.path.parts[-3:])
        for other in sorted(self.path.parents[3].glob(str(place))):
            if other != self.path and read_json(other.with_suffix(".json")) == self.made_from:
                shutil.copyfile(other, partial := self.path.with_suffix(".partial"))
                partial.replace(self.path)
                return

    def read(self) -> dict[int, list[int]]:
        """The sound lines, without changing anything; none of a file made from something else."""
        self.found = {}
        if self.path.exists() and read_json(self.path.with_suffix(".json")) == self.made_from:
            for line in self.path.read_bytes().splitlines():
                try:
                    values = json.loads(line)
                    if values["crc32"] == _checksum(values["example"], values["ids"]):
                        self.found[values["example"]] = values["ids"]
                except (ValueError, KeyError, TypeError):  # torn or altered
                    continue
        return self.found

    def fill(self, responses: Iterable[Response], tokenizer: PreTrainedTokenizerBase) -> Iterator[Response]:
        """Writes a line at once for each response that has none yet; returns those."""
        with self.path.open("a", encoding="utf-8") as file:
            for example, ids in responses:
                if example in self.found:  # written again only because its batch was
                    continue
                values = {"example": example, "ids": ids, "text": tokenizer.decode(ids)}
                file.write(json.dumps(values | {"crc32": _checksum(example, ids)}, ensure_ascii=False) + "\n")
                file.flush()
                self.found[example] = ids
                yield example, ids


def _checksum(example: int, ids: list[int]) -> int:
    return zlib.crc32(json.dumps([example, ids]).encode())
