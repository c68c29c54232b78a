"""Training sees what serving sees: chat templates of the structure that published models have, and rows as found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers_of_kinds import byte_level

from decode.errors import UserError
from decode.models.tokens import chat_ids, check_template, plain_ids
from distill.config import DataSettings
from distill.data.chat import IGNORE, ChatFormat, Example, chat_turns, label, rendered_ids
from distill.data.corpus import Corpus, load_corpus
from distill.data.messages import UnusableRow, read_messages

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
CHAT: list[dict[str, Any]] = [USER, HELLO, AGAIN, FINE]


CALL = {"type": "function", "function": {"name": "sky", "arguments": {"city": "Köln"}}}
CALLS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    FINE,
]


def format_of(name: str, **args: Any) -> ChatFormat:
    tokenizer = byte_level(size=290, special=MARKERS.split())
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.eos_token, tokenizer.chat_template = "<eos>", TEMPLATES[name]
    ends = [int(tokenizer.convert_tokens_to_ids(token)) for token in ENDS.get(name, ["<|im_end|>", "<eos>"])]
    return ChatFormat(tokenizer, None, args, ends)


def spans(chat: ChatFormat, example: Example) -> list[tuple[list[int], str]]:
    """The ids before each labelled span, and its text."""
    found: list[tuple[list[int], list[int]]] = []
    for place, token in enumerate(example.labels):
        if token == IGNORE:
            continue
        if example.labels[place - 1] == IGNORE:
            found.append((example.input_ids[:place], []))
        found[-1][1].append(token)
    return [(before, chat.tokenizer.decode(ids)) for before, ids in found]


def learned(chat: ChatFormat, messages: list[dict[str, Any]]) -> list[str]:
    """What is learned of each turn, each checked to follow the prompt as served and to end with the example or turn."""
    cleaned, _ = read_messages(messages)
    turns, _ = chat_turns(chat, cleaned)
    (examples,) = label(chat.tokenizer, [turns], chat.ends, chat=True)
    assert isinstance(examples, list), examples
    found = [span for example in examples for span in spans(chat, example)]
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
    ],
)
def test_an_answer_ends_at_the_targets_stop_token_and_nothing_is_appended(name: str, args: Any, written: str) -> None:
    chat = format_of(name, **args)
    messages = [SYSTEM, *CHAT] if name == "mistral" else CHAT
    assert learned(chat, messages) == [written.format("Hello"), written.format("Fine")]
    assert chat.tokenizer.convert_ids_to_tokens(chat.answer_end()) == written[written.rindex("<") :]
    prompts = [turn.prompt for turn in chat_turns(chat, long_chat(5))[0]]
    assert rendered_ids(chat.tokenizer, prompts, chat.ends) == plain_ids(chat.tokenizer, prompts)


@pytest.mark.parametrize(
    ("name", "args", "lead"),
    [
        ("qwen3", {"enable_thinking": False}, ""),
        ("qwen3", {}, ""),
        ("qwen3.5", {"enable_thinking": False}, ""),
        ("qwen3.5", {}, "\n</think>\n\n"),
        ("r1", {}, "\n</think>\n\n"),
    ],
)
def test_every_turn_follows_its_own_prompt_without_an_empty_thought(name: str, args: Any, lead: str) -> None:
    end = "<eos>" if name == "r1" else "<|im_end|>"
    three = [*CHAT, {"role": "user", "content": "Good"}, {"role": "assistant", "content": "Bye"}]
    assert learned(format_of(name, **args), three) == [f"{lead}{text}{end}" for text in ("Hello", "Fine", "Bye")]
    noted = chat_turns(format_of(name, **args), three)[1]
    assert [("without reasoning" in note) for note in noted] == [True] * (not args)


def test_a_developer_is_the_system_where_the_template_knows_no_such_role() -> None:
    turns, _ = chat_turns(format_of("deepseek"), [SYSTEM | {"role": "developer"}, *CHAT])
    assert turns[0].prompt == "Made by developers.<|system|>Be kind.<|user|>Hi<|assistant|>"


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


def test_tool_calls_behind_the_stop_token_drop_the_row() -> None:
    with pytest.raises(UnusableRow, match="with tool calls that the chat template does not write"):
        chat_turns(format_of("nemotron"), read_messages(CALLS)[0])


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
def test_reasoning_is_learned_under_every_name_in_every_turn(key: str, name: str, written: str) -> None:
    thinking = [USER, HELLO | {key: "hm"}, AGAIN, FINE | {key: "hm"}]
    assert learned(format_of(name), thinking) == [written.format("Hello"), written.format("Fine")]


def test_reasoning_inside_the_answer_is_that_of_its_own_key() -> None:
    inline = [USER, {"role": "assistant", "content": "<think>hm</think>Hello"}]
    for name in ("qwen3", "r1"):
        chat = format_of(name)
        assert learned(chat, inline) == learned(chat, [USER, HELLO | {"reasoning": "hm"}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, HELLO | {"thinking": "hm"}], "with reasoning that the chat template does not write"),
        ([{"role": "user", "content": "Hi<|im_end|>\n<|im_start|>system"}, HELLO], "with a control token"),
        ([USER, {"role": "assistant", "content": "It ends with <|im_end|>."}], "with a control token"),
        ([USER, {"role": "narrator", "content": "Rain."}, HELLO], "with a turn that the chat template does not write"),
    ],
)
def test_what_cannot_be_learned_as_it_is_served_is_refused(messages: list[dict[str, Any]], reason: str) -> None:
    chat = format_of("parts")
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "{% for m in messages %}", "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}"
    )
    with pytest.raises(UnusableRow, match=reason):
        chat_turns(chat, read_messages(messages)[0])
    with pytest.raises(UserError, match="control token"):
        chat_ids(chat.tokenizer, [{"role": "user", "content": "<|im_end|>"}])


def test_a_stop_token_within_the_answer_drops_the_row() -> None:
    chat = format_of("qwen3")
    stops = [*chat.ends, chat.tokenizer("Hello")["input_ids"][0]]
    turns, _ = chat_turns(chat, [USER, HELLO])
    (found,) = label(chat.tokenizer, [turns], stops, chat=True)
    assert isinstance(found, UnusableRow)
    assert found.reason == "whose answer is not learned whole, up to one stop token"


def test_speakers_calls_and_keys_of_published_chats() -> None:
    messages, notes = read_messages([
        {"from": "human", "value": "Rome?"}, {"from": "function_call", "value": '{"name": "w", "arguments": {"c": 1}}'},
        {"from": "observation", "value": "sun"}, {"from": "chatgpt", "value": "Sunny"},
    ])  # fmt: skip
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "w", "arguments": {"c": 1}}
    assert notes == []
    old = {"role": "assistant", "content": None, "tool_calls": [], "function_call": {"name": "w", "arguments": "{}"}}
    assert read_messages([USER, old])[0][1]["tool_calls"][0]["function"] == {"name": "w", "arguments": {}}
    with pytest.raises(UnusableRow, match="names no function"):
        read_messages([{"from": "human", "value": "Rome?"}, {"from": "function_call", "value": "{name"}])
    _, notes = chat_turns(format_of("qwen3", enable_thinking=False), [USER, HELLO | {"mood": "good"}])
    assert notes == ["with a message's 'mood', which is not used"]


def test_a_tokenizer_may_have_several_templates() -> None:
    chat = format_of("parts")
    check_template(chat.tokenizer)
    chat.tokenizer.chat_template = {"default": TEMPLATES["parts"], "tool_use": TEMPLATES["parts"]}  # as Hermes 3 has
    assert learned(chat, CHAT) == ["Hello<|im_end|>", "Fine<|im_end|>"]


def test_a_template_may_be_a_file_and_rows_that_fail_in_large_part_stop_the_run(tmp_path: Path) -> None:
    rows, file, chat = tmp_path / "rows.jsonl", tmp_path / "chat.jinja", format_of("gemma")
    file.write_text(TEMPLATES["gemma"])

    def corpus(template: str, question: str = "?") -> Corpus:
        rows.write_text("".join(f'{{"question": "{n}{question}", "answer": "It is {n}"}}\n' for n in range(60)))
        settings = DataSettings(source=str(rows), chat_template=template)
        return load_corpus(settings, seed=0, folder=None, tokenizer=chat.tokenizer, ends=chat.ends)

    first = corpus(str(file)).train[0]
    assert first["prompt"].startswith("<start_of_turn>user\n")
    assert first["labels"][-1] == chat.ends[1]
    with pytest.raises(UserError, match=r"Jinja template .* a file"):
        DataSettings(source=str(rows), chat_template="templates/chat.jinja").validate()
    with pytest.raises(UserError, match="does not write the assistant's turns"):
        corpus("{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"rows cannot be learned as they would be served.*control token.*row 1"):
        corpus(str(file), "<eos>?")


def long_chat(turns: int) -> list[dict[str, Any]]:
    ask = [{"role": "user", "content": f"question {n} for you"} for n in range(turns)]
    say = [{"role": "assistant", "content": f"answer {n} from me"} for n in range(turns)]
    return [message for pair in zip(ask, say) for message in pair]


@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_what_is_tokenised_of_a_chat_grows_with_its_length_and_not_with_its_square(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def characters(turns: int) -> int:
        chat, seen = format_of(name), list[str]()

        def counted(tokenizer: Any, texts: Any) -> list[list[int]]:
            seen.extend(texts)
            return plain_ids(tokenizer, texts)

        monkeypatch.setattr("distill.data.chat.plain_ids", counted)
        (examples,) = label(chat.tokenizer, [chat_turns(chat, long_chat(turns))[0]], chat.ends, chat=True)
        assert isinstance(examples, list)
        return sum(map(len, seen))

    assert characters(48) < 4.5 * characters(12)
