"""Files of heads: our own, and those that other projects publish.

Published heads of one network differ in config.json (see `head_configs`), in the names of tensors and in what they
leave to the target. Engines skip tensors that they do not know; here each has its place, or the head is refused.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.models.block_head import BLOCK_ARCHITECTURES, BlockHead
from decode.models.head_configs import NEXT, block_config_of, block_fields, eagle_config, head_format
from decode.models.heads import ARCHITECTURES, DraftHead, FeatureHead
from decode.models.mtp import MTP, MtpHead, load_mtp
from decode.models.wrapped import pinned

RENAMED = {r"^(model\.)+": "", r"^layers\.0\.": "midlayer.", r"^draft_id_to_target_id$": "d2t"}
"""Names of tensors in other projects' files, and ours."""
UNREAD = re.compile(r"rotary_emb\.inv_freq$|^verifier_")  # tensors that decoding does not read
SHARED, HEAD = "embed_tokens.weight", "lm_head.weight"


def is_head(name: str | os.PathLike[str]) -> bool:
    """Whether a folder or Hub name holds a head, or a draft of another format, which `load_head` refuses."""
    if name == MTP:
        return True
    folder = Path(name)
    try:
        if not folder.exists():
            repository, revision = pinned(name)
            cached = try_to_load_from_cache(repository, "config.json", **revision)
            if not isinstance(cached, str):
                told = HfApi().model_info(repository, timeout=5, revision=revision.get("revision"))
                return head_format(told.config or {}) is not None
            folder = Path(cached).parent
        files = folder.glob("*.safetensors")
        names = [_our_name(key) for file in files for key in safe_open(file, "pt").keys()]  # noqa: SIM118
        return head_format(json.loads((folder / "config.json").read_text(encoding="utf-8")), names) is not None
    except Exception:  # the network layer has many; what is wrong is told when the draft is opened as a model
        return False


def _our_name(name: str) -> str:
    """Our name of a tensor; EAGLE-1's layer is called as EAGLE-3's here."""
    for pattern, ours in RENAMED.items():
        name = re.sub(pattern, ours, name)
    return name


def save_head(head: DraftHead, folder: str | Path, shared: dict[str, Tensor] | None = None) -> None:
    """Writes config.json and model.safetensors into an existing folder.

    The vocabulary's tables d2t and t2d are written only where the head drafts some of the target's tokens: vLLM makes
    no parameter for them where the vocabularies are equal.

    Args:
        head: a head.
        folder: where to write it.
        shared: tensors of the target that are written beside the head's, for engines that do not take them from it.
    """
    folder = Path(folder)
    tables = () if head.reduced else ("d2t", "t2d")
    state = {name: tensor for name, tensor in head.state_dict().items() if name not in tables} | (shared or {})
    fields = block_fields(head) if isinstance(head, BlockHead) else head.config.to_dict()
    if isinstance(head, MtpHead):
        own = {name: fields.get(name) for name in ("dtype", "num_assistant_tokens")}
        state, fields = head.tensors(), head.target_config.to_diff_dict() | own | {"draft_format": MTP}
        fields.pop("quantization_config", None)  # tuned layers have no scales
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2, default=str) + "\n")


def load_head(name: str | os.PathLike[str], target: PreTrainedModel | None = None) -> DraftHead:
    """A head from its folder or from the Hub, ours or a published one in safetensors.

    Args:
        name: folder with config.json and safetensors files, or Hub name (with its revision after an @).
        target: the model it drafts for, to fill in and check what the file leaves to it; the head takes its number
            format and device. A target's next-token layers are not loaded without it.

    Raises:
        UserError: a damaged or unfit head, or another format of drafts.
    """
    try:
        folder, files = Path(name), ["config.json", "*.safetensors"]
        if not folder.exists():
            repository, revision = pinned(name)
            folder = Path(snapshot_download(repository, revision=revision.get("revision"), allow_patterns=files))
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = [item for file in sorted(folder.glob(files[1])) for item in load_file(file).items()]
        state = {_our_name(key): tensor for key, tensor in tensors if not UNREAD.search(key)}
        version = head_format(fields, state)
        if version == MTP:
            if target is None:
                raise UserError(f"{name} holds next-token layers of a target; load them together with it")
            layers = load_mtp(target, folder)
            layers.config.num_assistant_tokens = fields["num_assistant_tokens"]
            return layers
        if version not in (*ARCHITECTURES, *BLOCK_ARCHITECTURES):
            what = f"a draft in the format of {version}" if version else "no feature head"
            raise UserError(
                f"{name} holds {what} (architectures {fields.get('architectures')}), which is not run: {NEXT}"
            )
        if not state:
            raise UserError(
                f"{name} has no safetensors file; weights in a pickle (pytorch_model.bin) are not read, since that can "
                'run code. If you trust them: python -c "import torch, safetensors.torch as s; '
                "s.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
            )
        if version != 3:
            state = {re.sub("^midlayer", "layers.0", key): tensor for key, tensor in state.items()}
        head: DraftHead
        if version == 1 or version == 3:
            head = FeatureHead(eagle_config(fields, state, target, str(name), version))
        else:
            head = BlockHead(block_config_of(fields, state, target, str(name), str(version)))
        _fill(head, state, target, str(name), ours="captured_layers" in fields)
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the bytes lead to
        raise UserError(
            f"{name} holds no feature head that can be read; save it or download it again ({error!r})"
        ) from error
    if target is not None:
        device = target.get_input_embeddings().weight.device
        head.to(device=device, dtype=target.dtype)
        head.rotary = LlamaRotaryEmbedding(head.config).to(device)  # frequencies are not to be rounded
    return head.eval()


def _fill(head: DraftHead, state: dict[str, Tensor], target: PreTrainedModel | None, name: str, *, ours: bool) -> None:
    """Fill a head with the tensors of its files, and with the target's where these leave them to it."""
    config, modules, ids = head.config, dict(head.named_modules()), None
    if "d2t" in state:
        ids = torch.arange(len(state["d2t"])) + state["d2t"]
        times = torch.bincount(ids, minlength=config.vocab_size)  # refuses fractions and negative numbers
        if (
            len(times) > config.vocab_size
            or times.max() > 1
            or (head.reduced and not times.equal(state.get("t2d", times).long()))
        ):
            raise UserError(
                f"the table d2t in {name} does not lead, added to 0, 1, …, to {len(ids)} different tokens of "
                f"{config.vocab_size}, those of t2d; download it again, or {NEXT}"
            )
    if isinstance(head, BlockHead):
        _drop_copies(state, target, ids, name)
    elif target is not None:
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings().weight.detach()
        if not ours and type(embedding) is not nn.Embedding:  # engines give a head the bare table, which Gemma scales
            state.setdefault(SHARED, embedding.weight.detach())
        if head.version == 1 and torch.equal(state.get(HEAD, output).to(output), output):
            state.pop(HEAD, None)  # a copy of the target's
        if head.version == 3 and HEAD not in state:
            rows = state.get(SHARED, output) if config.tie_word_embeddings else output
            state[HEAD] = rows if ids is None else rows[ids.to(rows.device)]
    if SHARED in state or config.target_hidden_size != config.hidden_size:
        head.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        head.embed_tokens.requires_grad_(False)
    for key, tensor in state.items():
        linear = modules.get(key.removesuffix(".bias"))
        if key.endswith(".bias") and isinstance(linear, nn.Linear):
            linear.bias = nn.Parameter(tensor)
    if isinstance(head, FeatureHead) and "fc.bias" not in state:
        head.fc.register_parameter("bias", None)
    # files may leave out t2d, which follows from d2t, and both where the head drafts all tokens
    wanted, optional = head.state_dict(), {"t2d"} if head.reduced else {"t2d", "d2t"}
    lacking, beside = sorted(wanted.keys() - state.keys() - optional), sorted(state.keys() - wanted.keys())
    if lacking or beside:
        kind = f"{head.version} head of {config.num_hidden_layers} Qwen3 layers"
        if isinstance(head, FeatureHead):
            kind = f"EAGLE-{head.version} head of one Llama or Qwen3 layer"
        raise UserError(
            f"{name} is no whole {kind}: it lacks {lacking[:4]} and has {beside[:4]} beside it ({len(lacking)} and "
            f"{len(beside)} tensors); download it again, or {NEXT}"
        )
    head.load_state_dict(wanted | state)
    if head.reduced:
        head.set_vocabulary(cast(Tensor, head.draft_ids()))


def _drop_copies(state: dict[str, Tensor], target: PreTrainedModel | None, ids: Tensor | None, name: str) -> None:
    """Takes the target's embedding and output head out of a block head's tensors.

    Raises:
        UserError: they are not the target's, or there is no target to compare them with.
    """
    for key in [key for key in (SHARED, HEAD) if key in state]:
        if target is None:
            raise UserError(f"{name} has a copy of its target's {key}; load it together with its target")
        own, model = state.pop(key), target.get_input_embeddings() if key == SHARED else target.get_output_embeddings()
        theirs = model.weight.detach()
        theirs = theirs[ids.to(theirs.device)] if key == HEAD and ids is not None else theirs
        # the file may hold either model's number format
        if not (torch.equal(own.to(theirs), theirs) or torch.equal(own, theirs.to(own))):
            raise UserError(
                f"{key} of {name} ({list(own.shape)}) is not the target's ({list(theirs.shape)}), and a block head is "
                f"run with the target's embedding and output head: {NEXT}"
            )
