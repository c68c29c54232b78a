"""Training sees what serving sees: chat templates of the structure that published models have, and rows as found."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from some_rows import made_of, prompts_of, spans, taught, write_rows
from tokenizers import AddedToken
from tokenizers_of_kinds import CHAT_TEMPLATES, byte_level, with_start

from decode.errors import UserError
from decode.incoming import UnusableRow, read_messages
from decode.models.tokens import chat_ids, plain_ids, start_ids, turn_end
from distill.config.data import DataSettings
from distill.data import chat as chat_module
from distill.data.chat import IGNORE, ChatFormat, Written, chat_turns, label, rendered_ids, squash
from distill.data.corpus import Corpus, load_corpus

MARKERS = "<eos> <start_of_turn> <end_of_turn> <|im_start|> <|im_end|> <|user|> <|assistant|> <|end|>"
TEMPLATES = {
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<eos>{% endif %}"
    ),
    "glm": (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>\n{% endif %}"
        "{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if enable_thinking is false }}{% endif %}"
    ),
    "qwen3": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
        "{% set text = m.content %}{% if '</think>' in text %}"
        "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ text }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "qwen3.5": (  # the prompt opens the reasoning
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last %}"
        "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
        "{{ '\n</think>\n\n' if enable_thinking is false }}{% endif %}"
    ),
    "r1": (  # what was thought is never rendered
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
        "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    ),
    "harmony": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<channel>analysis<message>{{ m.thinking }}<|end|><|im_start|>assistant{% endif %}"
        "<channel>final{% endif %}<message>{{ m.content }}"
        "{{ '<eos>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "mistral": (  # the system message stands in the last question; no text beside tool calls
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ messages[0].content ~ '\n\n' if loop.last and rest != messages }}"
        "{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% elif m.tool_calls %}"
        "[CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<eos>"
        "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
    ),
    "gemma4": (  # the prompt has an empty block of reasoning that later turns leave out; calls before the text
        "{% for m in messages %}{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
        "<start_of_turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n<|channel>thought\n<channel|>{% endif %}"
    ),
    "kimi": (  # what was thought is rendered as an empty block
        "{% for m in messages %}<|{{ m.role }}|>{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "deepseek": (  # arguments of tool calls are texts; the word 'developers' is no role
        "Made by developers.{% for m in messages %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}{{ m.content }}"
        "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "nemotron": (  # calls stand behind the stop token
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
"""Of Gemma 3, Phi-3.5, GLM-4.5, Qwen3, Qwen3.5, DeepSeek-R1, gpt-oss, LLaVA and others, as far as turns are concerned."""
ENDS = {"gemma": ["<eos>", "<end_of_turn>"], "phi": ["<|end|>", "<|assistant|>", "<eos>"], "glm": ["<eos>", "<|user|>"]}
ENDS |= {"gemma4": ["<end_of_turn>"], "kimi": ["<|end|>"]}
ENDS |= {name: ["<eos>"] for name in ("r1", "harmony", "mistral", "deepseek", "nemotron")}
USER, AGAIN = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And you?"}
HELLO, FINE = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "Fine"}
CHAT = [USER, HELLO, AGAIN, FINE]


CALL = {"type": "function", "function": {"name": "sky", "arguments": {"city": "Köln"}}}
CALLS = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}, FINE]


def format_of(name: str, **args: Any) -> ChatFormat:
    tokenizer = byte_level(size=290, special=MARKERS.split())
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.eos_token, tokenizer.chat_template = "<eos>", TEMPLATES[name]
    ends = [int(tokenizer.convert_tokens_to_ids(token)) for token in ENDS.get(name, ["<|im_end|>", "<eos>"])]
    return ChatFormat(tokenizer, None, args, ends)


def learned(chat: ChatFormat, messages: list[dict[str, Any]]) -> list[str]:
    """What is learned of each turn, each checked to follow the prompt as served and to end with the example or turn."""
    cleaned, _ = read_messages(messages)
    turns, _ = chat_turns(chat, cleaned)
    (examples,) = label(chat.tokenizer, [turns], chat.ends, chat=True)
    assert isinstance(examples, list), examples
    found = [span for each in examples for span in spans(chat.tokenizer, each.input_ids, each.labels)]
    places = [i for i, message in enumerate(cleaned) if message["role"] == "assistant"]
    for place, (before, text) in zip(places, found, strict=True):
        assert before == chat_ids(chat.tokenizer, cleaned[:place], chat.template_args)
        ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert [token in chat.ends for token in ids] == [False] * (len(ids) - 1) + [True]
    assert all(example.labels[-1] != IGNORE for example in examples)
    return [text for _, text in found]


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("name", "args", "written"),
    [
        ("gemma", {}, "{}<end_of_turn>"),
        ("phi", {}, "{}<|end|>"),
        ("harmony", {}, "<channel>final<message>{}<eos>"),
        ("glm", {"enable_thinking": False}, "\n{}<|user|>"),  # ends with the next turn's beginning
        ("glm", {}, "{}<|user|>"),  # without the empty block
        ("mistral", {}, " {}<eos>"),
        ("gemma4", {}, "{}<end_of_turn>"),
        ("kimi", {}, "{}<|end|>"),
        ("parts", {}, "{}<|im_end|>"),
        ("qwen3", {"enable_thinking": False}, "{}<|im_end|>"),
        ("qwen3", {}, "{}<|im_end|>"),
        ("qwen3.5", {"enable_thinking": False}, "{}<|im_end|>"),
        ("qwen3.5", {}, "\n</think>\n\n{}<|im_end|>"),  # the prompt opens the reasoning
        ("r1", {}, "\n</think>\n\n{}<eos>"),
    ],
)
def test_every_turn_follows_its_prompt_and_ends_at_the_stop_token(name: str, args, written: str) -> None:
    """Without an empty thought where the prompt asks for one: this is noted."""
    chat = format_of(name, **args)
    messages = [*[SYSTEM][: name == "mistral"], *CHAT, AGAIN, HELLO]
    assert learned(chat, messages) == [written.format(text) for text in ("Hello", "Fine", "Hello")]
    turns, notes = chat_turns(chat, messages)
    thinks = not args and name in ("glm", "qwen3", "qwen3.5", "r1", "kimi")
    assert sum("without reasoning" in note for note in notes) == thinks
    assert chat.tokenizer.convert_ids_to_tokens(chat.answer_end()) == written[written.rindex("<") :]
    prompts = [turn.prompt for turn in turns]
    assert rendered_ids(chat.tokenizer, prompts, chat.ends) == plain_ids(chat.tokenizer, prompts)
    chat.tokenizer.chat_template = {"default": TEMPLATES[name], "tool_use": TEMPLATES[name]}  # as Hermes 3 has
    assert [turn.prompt for turn in chat_turns(chat, messages)[0]] == prompts


@pytest.mark.parametrize(
    ("name", "call", "end"),
    [
        ("mistral", '[CALLS]{"name": "sky", "arguments": {"city": "Köln"}}', "<eos>"),
        ("gemma4", '<call>sky{"city": "Köln"}', "<end_of_turn>"),
        ("deepseek", '<call>sky{"city": "Köln"}', "<eos>"),
    ],
)
def test_tool_calls_are_learned_as_the_template_writes_them(name: str, call: str, end: str) -> None:
    assert [text.strip() for text in learned(format_of(name), CALLS)] == [f"{call}{end}", f"Fine{end}"]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\n{}<|im_end|>"),
        ("qwen3.5", "hm\n</think>\n\n{}<|im_end|>"),
        ("r1", "hm\n</think>\n\n{}<eos>"),
        ("harmony", "<channel>analysis<message>hm<|end|><|im_start|>assistant<channel>final<message>{}<eos>"),
        ("kimi", "<think>hm</think>{}<|end|>"),
    ],
)
def test_reasoning_is_learned_under_every_name_and_in_every_turn(key: str, name: str, written: str) -> None:
    ways = [{key: "hm"}] + [{}] * (name in ("qwen3", "r1"))
    for way in ways:
        said = [{"content": "<think>hm</think>" * (not way) + turn["content"]} | way for turn in (HELLO, FINE)]
        messages = [USER, HELLO | said[0], AGAIN, FINE | said[1]]
        assert learned(format_of(name), messages) == [written.format("Hello"), written.format("Fine")]


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("parts", [USER, HELLO | {"thinking": "hm"}], "with reasoning that the chat template does not write"),
        ("parts", [{"role": "user", "content": "Hi<|im_end|>\n<|im_start|>system"}, HELLO], "with a control token"),
        ("parts", [USER, {"role": "assistant", "content": "It ends with <|im_end|>."}], "with a control token"),
        ("parts", [USER, {"role": "narrator", "content": "Rain."}, HELLO], "with a turn that the chat template does"),
        ("nemotron", CALLS, "with tool calls that the chat template does not write"),
        ("qwen3", [USER, {"role": "assistant", "content": "Stop"}], "whose answer is not learned whole, up to one"),
    ],
)
def test_what_would_not_be_learned_as_served_is_refused(name: str, messages: list[dict[str, Any]], reason: str) -> None:
    chat = format_of(name)
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for", "{% for m in messages if m.role != 'narrator' %}"
        "<|im_start|>{{ m.role }}\n{% for",
    )  # fmt: skip
    stops = [*chat.ends, chat.tokenizer("Stop")["input_ids"][0]]
    with pytest.raises(UnusableRow, match=reason):
        raise label(chat.tokenizer, [chat_turns(chat, read_messages(messages)[0])[0]], stops, chat=True)[0]
    with pytest.raises(UserError, match="control token"):
        chat_ids(chat.tokenizer, [{"role": "user", "content": "<eos>"}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_template_s_turns_is_known_without_a_file_that_names_it(name: str) -> None:
    tokenizer = format_of(name).tokenizer
    ends = {"gemma": "<end_of_turn>", "gemma4": "<end_of_turn>", "phi": "<|end|>", "kimi": "<|end|>"}
    known = ENDS.get(name) == ["<eos>"] or name == "glm"  # which writes nothing behind an answer
    found = turn_end(tokenizer, [tokenizer.eos_token_id])
    assert found == (None if known else tokenizer.convert_tokens_to_ids(ends.get(name, "<|im_end|>")))
    assert turn_end(tokenizer, format_of(name).ends) is None


def test_speakers_calls_and_keys_of_published_chats() -> None:
    turns, _ = chat_turns(format_of("deepseek"), [SYSTEM | {"role": "developer"}, *CHAT])
    assert turns[0].prompt == "Made by developers.<|system|>Be kind.<|user|>Hi<|assistant|>"
    messages, note = read_messages([
        {"from": "human", "value": "Rome?"}, {"from": "function_call", "value": '{"name": "w", "arguments": {"c": 1}}'},
        {"from": "observation", "value": "sun"}, {"from": "chatgpt", "value": "Sunny"},
    ])  # fmt: skip
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "w", "arguments": {"c": 1}}
    assert not note
    old = {"role": "assistant", "content": None, "tool_calls": [], "function_call": {"name": "w", "arguments": "{}"}}
    assert read_messages([USER, old])[0][1]["tool_calls"][0]["function"] == {"name": "w", "arguments": {}}
    with pytest.raises(UnusableRow, match="names no function"):
        read_messages([{"from": "human", "value": "Rome?"}, {"from": "function_call", "value": "{name"}])
    _, notes = chat_turns(format_of("qwen3", enable_thinking=False), [USER, HELLO | {"mood": "good"}])
    assert notes == ["with a message's 'mood', which is not used"]


def test_a_template_may_be_a_file_and_rows_that_fail_in_large_part_stop_the_run(tmp_path) -> None:
    rows, file, chat = tmp_path / "rows.jsonl", tmp_path / "chat.jinja", format_of("gemma")
    file.write_text(TEMPLATES["gemma"])

    def corpus(template: str, question: str = "?") -> Corpus:
        rows.write_text("".join(f'{{"question": "{n}{question}", "answer": "It is {n}"}}\n' for n in range(60)))
        settings = DataSettings(source=str(rows), chat_template=template)
        return load_corpus(settings, seed=0, folder=None, tokenizer=chat.tokenizer)

    first = corpus(str(file))
    assert prompts_of(first, first.train)[0].startswith("<start_of_turn>user\n")
    assert first.train[0]["labels"][-1] == chat.ends[1]
    with pytest.raises(UserError, match=r"Jinja template .* a file"):
        DataSettings(source=str(rows), chat_template="templates/chat.jinja").validate()
    with pytest.raises(UserError, match="does not write the assistant's turns"):
        corpus("{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"rows cannot be learned as they would be served.*control token.*row 1"):
        corpus(str(file), "<eos>?")


@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_a_chat_of_twice_as_many_turns_has_twice_as_many_characters_tokenised_and_four_times_as_many_written_and_searched(
    name: str, monkeypatch
) -> None:
    """Also in a template that trims its texts, so that none stands in the prompt as it is; counted, not timed."""
    render, chat, tokenised, searched = ChatFormat.render, format_of(name), Counter[int](), Counter[int]()

    def counted_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
        tokenised[turns] += sum(map(len, texts))
        return plain_ids(tokenizer, texts)

    def counted_text(text: str) -> str:
        searched[turns] += len(text)
        return squash(text)

    def counted_render(self: ChatFormat, *given: Any, **how: Any) -> str:
        text = render(self, *given, **how)
        searched[turns] += len(text)
        return text

    monkeypatch.setattr(chat_module, "plain_ids", counted_ids)
    monkeypatch.setattr(chat_module, "squash", counted_text)
    monkeypatch.setattr(ChatFormat, "render", counted_render)
    for turns in (10, 20, 40):
        texts = [f" {n} in words \n" for n in range(2 * turns)]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        (examples,) = label(chat.tokenizer, [chat_turns(chat, messages)[0]], chat.ends, chat=True)
        assert isinstance(examples, list)
    for fewer, more in ((10, 20), (20, 40)):
        assert tokenised[more] < 2.2 * tokenised[fewer]
        assert searched[more] < 4.3 * searched[fewer]


# -- rows as they occur in other people's data, each with the outcome that it must have --------------------------------

ROWS = [json.loads(line) for line in (Path(__file__).parent / "awkward_rows.jsonl").read_text().splitlines()]


GOOD = {"messages": CHAT}, {"question": "good", "answer": "fine"}


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["name"])
def test_a_row_has_the_outcome_that_it_must_have(case: dict[str, Any]) -> None:
    tokenizer, template, row = with_start(case["template"]), case["template"], case["row"]
    examples, notes = made_of(row, tokenizer, GOOD["messages" not in row], chat=template is not None)
    if case["outcome"] != "kept":
        assert not examples
        assert [reason.startswith(case["outcome"]) for reason, _ in notes] == [True]
        return
    assert [case.get("note", "nothing is noted") in reason for reason, _ in notes] == [True] * ("note" in case)
    prompts, learned = zip(*taught(tokenizer, examples))
    assert list(learned) == case.get("examples", [case.get("learned")])
    written = CHAT_TEMPLATES[template].startswith("{{ bos_token }}") if template else True
    starts = start_ids(tokenizer) if written else []  # a chat begins as its template says
    assert examples[0].input_ids[: len(starts)] == starts
    assert examples[0].input_ids.count(1) == len(starts) + prompts[0].count("<user><s>")
    assert prompts[0] == case.get("prompt", prompts[0])


def corpus_of_pairs(folder: Path, template: str | None, **settings: Any) -> Corpus:
    rows = [{"question": f"{n}+1?", "answer": "2"} for n in range(20)]
    given = DataSettings(source=write_rows(folder / "rows.jsonl", rows), **settings)
    return load_corpus(given, seed=0, folder=None, tokenizer=with_start(template))


@pytest.mark.parametrize(
    ("template", "settings", "prompt"),
    [
        ("plain", {}, "<user>0+1?<assistant>"),
        ("plain", {"chat": False}, "0+1?\n"),
        (None, {}, "0+1?\n"),
        (
            "thinking",
            {"system": "Be brief", "template_args": {"enable_thinking": False}},
            "<system>Be brief<user>0+1?<assistant><think></think>",
        ),
    ],
)
def test_pairs_follow_the_chat_template(tmp_path, template: str | None, settings, prompt: str) -> None:
    corpus = corpus_of_pairs(tmp_path, template, **settings)
    assert prompt in prompts_of(corpus, corpus.train, corpus.validation, corpus.test)
    assert any("chat template" in note for note in corpus.notes) == prompt.startswith("<")


def test_chats_without_a_template_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"has no chat template.*data\.chat_template"):
        corpus_of_pairs(tmp_path, None, chat=True)


@pytest.mark.parametrize(("left_out", "moved"), [(0, False), (3, False), (2, True)])
def test_a_turn_that_is_not_written_is_noticed_wherever_the_others_stand(left_out: int, moved: bool) -> None:
    texts = ["alpha", "beta", "gamma beta", "delta"]
    written = Written(" ".join([*texts[1:], texts[0]] if moved else texts))
    assert all(written.holds(text, in_order=number > 0 or not moved) for number, text in enumerate(texts))
    without = Written(" ".join(text for number, text in enumerate(texts) if number != left_out))
    assert not all(without.holds(text) for text in texts)
