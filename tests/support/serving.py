"""A server that speaks OpenAI's protocol in token ids, and one that gives a tiny model's states away as vLLM does."""

from __future__ import annotations

import copy
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from distill.networks.layers import final_norm

Reply = tuple[int, Any]


@contextmanager
def serving(
    answer: Callable[[dict[str, Any], int], Reply], context: int | None = None, metrics: Callable[[], str] = str
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers by a request's body and its number, from 1: its address, and the bodies.

    `metrics` makes what it gives for /metrics.
    """
    bodies, lock = list[dict[str, Any]](), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"object": "list", "data": [{"id": "target", "max_model_len": context}]}
            self.reply(200, metrics() if self.path == "/metrics" else models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"]))) | {"path": self.path}
            with lock:
                bodies.append(body)
                number = len(bodies)
            self.reply(*answer(body, number))

        def reply(self, status: int, value: Any) -> None:
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()


class StatesServer:
    """Answers as vLLM with the connector does: tokens, log-probabilities, and a file that appears a little later.

    Args:
        model: The target.
        layers: Whose entering states it gives away.
        folder: Of the files.
        spoil: Changes an answer and its tensors by the number of the request; returns whether a file is written.
        spoil_logits: Changes what it samples from, by the number of the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        folder: Path,
        spoil: Callable[[int, dict[str, Any], dict[str, torch.Tensor]], bool] = lambda *_: True,
        spoil_logits: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, logits: logits,
    ) -> None:
        self.model = copy.deepcopy(model)  # the other one is used at the same time
        self.layers, self.folder, self.spoil, self.spoil_logits = list(layers), folder, spoil, spoil_logits
        self.lock, self.most = threading.Lock(), 0  # the most files that were there at once

    @torch.no_grad()
    def __call__(self, body: dict[str, Any], number: int) -> Reply:
        ids, budget = list(body["prompt"]), body["max_tokens"]
        with self.lock:  # of the model
            chance = torch.Generator().manual_seed(body.get("seed", 0))
            ends = set(body.get("stop_token_ids", ()))
            while len(ids) < len(body["prompt"]) + budget and not ends & {*ids[len(body["prompt"]) :]}:
                logits = self.spoil_logits(number, self.model(torch.tensor([ids])).logits[0, -1].float())
                p = (logits / (body["temperature"] or 1)).softmax(-1)
                drawn = torch.multinomial(p, 1, generator=chance)
                ids.append(int(drawn if body["temperature"] else logits.argmax()))
            whole = body.get("kv_transfer_params", {}).get("include_output_tokens")
            read, kept = ids[:-1] if whole else body["prompt"], list[torch.Tensor]()
            hook = final_norm(self.model).register_forward_pre_hook(lambda _, given: kept.append(given[0]))
            out = self.model(torch.tensor([read]), output_hidden_states=True)
            hook.remove()
        planes = [*out.hidden_states[:-1], kept[0]]
        states = torch.stack([planes[layer][0] for layer in self.layers], 1)
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(read)}
        log_probs = out.logits[0].float().log_softmax(-1)
        rows = [{str(i): {"logprob": float(row[i])}} for row, i in zip(log_probs, read[1:])]
        path, new = self.folder / f"{number}.safetensors", ids[len(body["prompt"]) :]
        reason = "stop" if ends & {*new} else "length"
        answer = {
            "choices": [{"token_ids": new, "finish_reason": reason, "prompt_logprobs": [None, *rows]}],
            "kv_transfer_params": {"hidden_states_path": str(path), "layers": self.layers, "quantization": None},
        }
        if self.spoil(number, answer, tensors) and "kv_transfer_params" in body:
            threading.Timer(0.01, self.write, (tensors, path)).start()
        return answer.pop("status", 200), answer

    def write(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Write a file as a whole."""
        save_file(tensors, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        self.most = max(self.most, len(list(self.folder.glob("*.safetensors"))))
