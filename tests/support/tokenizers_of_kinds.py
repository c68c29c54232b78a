"""Small tokenizers of both kinds."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

OTHER = "A farm keeps 12 apples; how many more apples are there on the farm? Über 30 Maße voll, 日本."


def byte_level(
    text: str = OTHER, size: int = 290, special: Sequence[str] = ("<pad>", "</end>")
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges of its own, whose last special token ends texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    core.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])


def sentencepiece(text: str = OTHER, size: int = 90) -> PreTrainedTokenizerFast:
    """BPE as SentencePiece writes it: ``▁`` for a space, one put before every text, tokens ``<0x..>`` for bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=7
    )
    core.train_from_iterator([" ".join(text.split()), *"abcdefghijklmnopqrstuvwxyz"], trainer)
    content = json.loads(core.to_str())
    pieces = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    pieces[3:3] = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core.model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


# -- tokenizers with a start token, and chat templates -----------------------------------------------------------------

CHAT_TEMPLATES = {
    "plain": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "writes the start token": (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "strict": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tools": (
        "{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "thinking": (  # only answers after the last question keep what was thought; without thinking they show none
        "{% set last = namespace(user=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
        "{% if loop.index0 > last.user %}<think>{{ parts[0].split('<think>')[-1] if parts | length > 1 }}</think>"
        "{% endif %}{{ parts[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}"
        "{% endif %}"
    ),
}
"""Chat templates by what is particular to them."""


def with_start(template: str | None = None, *, adds: bool = True, end: bool = False) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer of characters, in the ways of Llama, Mistral and Gemma."""
    letters = "".join(chr(code) for code in range(33, 127)) + "\näöüßé’€"
    vocab = {piece: i for i, piece in enumerate(["</s>", "<s>", "▁", *dict.fromkeys(letters)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    single = f"{'<s> ' * adds}$A{' </s>' * end}"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>")
    if template is not None:
        fast.chat_template = CHAT_TEMPLATES[template]
    return fast
