"""Gives hidden states out of vLLM as files. The engine imports this file by its folder (PYTHONPATH), and nothing else.

vLLM's connector (0.32 and 0.33 alike) collects the states. Here a file appears whole or not at all, a failed write is
told to whoever waits for the file, and the CPU build works, which has neither streams nor pinned memory, fills
temperatures into a copy, and dies of a seed whose prompt is read in parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

if current_platform.is_cpu():  # vLLM 0.32 fills temperatures into a copy there (utils/cpu_triton_utils.py:398)

    def _spread(values: Any, ends: Any, count: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        """The value of each text for every one of its tokens, which end at ``ends``."""
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
        expanded = torch.repeat_interleave(values, counts, output_size=count)
        return expanded if replace_from == replace_to else expanded.masked_fill(expanded == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = _spread


def _without_rewinding(sample_tokens: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same method of a model runner, but texts whose prompts are read in part draw nothing with their own seeds.

    vLLM 0.32 draws and rewinds the generator (v1/worker/gpu_model_runner.py:3502), which a CPU's cannot do.
    """

    def sample(runner: Any, grammar: Any) -> Any:
        batch = runner.input_batch
        in_part = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        undrawn = {i: batch.generators.pop(i) for i in in_part if i in batch.generators}
        try:
            return sample_tokens(runner, grammar)
        finally:
            batch.generators.update(undrawn)

    return sample


UNFETCHED = 900  # seconds after which a file that nobody has fetched is deleted


class Happened:
    """Stands for the CUDA event of a copy where there is none."""

    def query(self) -> bool:
        """Whether the copy is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class DraftsmithConnector(ExampleHiddenStatesConnector):
    """Writes ``hidden_states [tokens, layers, width]`` and ``token_ids [tokens]`` of each finished request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.use_lock = False  # a file is renamed into place, so that there is nothing to wait for but itself
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        self.told = {
            "layers": list(draft.eagle_aux_hidden_state_layer_ids),
            "quantization": vllm_config.model_config.quantization,
        }

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the cache, in the process of a worker, where the CPU build's model runner is mended."""
        super().register_kv_caches(kv_caches)
        if current_platform.is_cpu():
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            GPUModelRunner.sample_tokens = _without_rewinding(GPUModelRunner.sample_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Write no file that is not asked for; add its layers, and how the engine is quantised, to the answer."""
        if not request.kv_transfer_params:
            self._request_filenames.pop(request.request_id, None)
            return False, None
        delayed, params = super().request_finished(request, block_ids)
        return delayed, params if params is None else params | self.told

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a request's states out of the cache and have them written."""
        if not self._is_tp_rank_zero or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        tensors, done = {"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}, Happened()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """Write a file and rename it into place; after a failure leave a file with the error."""
        folder, name = os.path.split(filename)
        partial_file = os.path.join(folder, f".{name}")
        try:
            os.makedirs(folder, exist_ok=True)
            event.synchronize()
            save_file(tensors, partial_file)
            os.chmod(partial_file, 0o644)
            os.replace(partial_file, filename)
        except Exception as error:
            with suppress(OSError):
                os.unlink(partial_file)
            with suppress(OSError), open(f"{filename}.failed", "w") as file:
                file.write(str(error))
            raise
        with suppress(OSError):
            for entry in os.scandir(folder):
                if ".safetensors" in entry.name and time.time() - entry.stat().st_mtime > UNFETCHED:
                    os.unlink(entry)
