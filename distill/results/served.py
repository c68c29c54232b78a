"""Measurements of an exported draft in vLLM, for a target that this process cannot hold."""

from dataclasses import asdict
from typing import cast

from decode.engines import server
from decode.engines.check import ServedText, acceptance_rates, mean_length
from decode.files import read_json, write_json
from decode.measure import machine
from decode.measure.report import console_table
from decode.measure.statistics import median_interval, plain
from decode.models.open import files_of, stop_ids
from decode.progress import current
from distill.config import EvaluationSettings
from distill.config.base import Values
from distill.data.dataset import Examples
from distill.export.card import PROFILE
from distill.run import Run

COLUMNS = ("temperature", "draft_length", "accepted_length", "speedup", "identical_share", "texts")


def measure_served(run: Run) -> None:
    """Serve the export without and with drafts of each length; write report.json and note it in the profile.

    The texts are answers to test prompts, one at a time. Speedups are over the same engine without a draft.

    Raises:
        UserError: The engine does not start.
    """
    settings, chosen = run.settings, run.chosen(run.settings.export.choose)
    how = cast(EvaluationSettings, settings.evaluation)
    examples = Examples.of(run.corpus.test, max(1, how.decode_prompts))
    prompts = [ids for ids in map(examples.prompt, range(len(examples))) if ids]
    files = files_of(run.target, trust_remote_code=settings.target.trust_remote_code)
    ends = stop_ids(files, run.tokenizer)
    kind = settings.student.draft
    method, most = kind.served, kind.longest(settings.student, max(how.draft_lengths))
    lengths = sorted({min(k, most) for k in how.draft_lengths})
    room = max(map(len, prompts)) + how.max_new_tokens + max(lengths) + 1
    engine = server.Engine(
        "vllm", str(run.served_folder), str(run.export), method, room, settings.target.dtype, threads=settings.threads,
        seconds=3600.0,
    )  # fmt: skip

    def written(length: int | None) -> dict[float, list[ServedText]]:
        options: Values = {"seed": settings.seed, "max_new_tokens": how.max_new_tokens, "stop_ids": ends}
        with server.opened(engine, length) as served:
            return server.write_all(served, prompts, how.temperatures, **options)

    current().begin(0, len(prompts) * len(how.temperatures) * (1 + len(lengths)))
    alone, rows = written(None), []
    for length in lengths:
        for t, texts in written(length).items():
            drafts = [text.drafts for text in texts]
            mean, se = mean_length(drafts)
            pairs = list(zip(texts, alone[t]))
            speedup, interval = median_interval(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
            rates = enumerate(acceptance_rates(drafts, length), 1)
            rows.append({
                "engine": "vllm", "temperature": t, "draft_length": length, "accepted_length": mean,
                "accepted_length_se": se, "speedup": speedup, "speedup_ci95": interval, "texts": len(texts),
                "identical_share": None if t else sum(a.ids == b.ids for a, b in pairs) / len(texts),
                "positions": [{"position": place, "served": rate} for place, rate in rates],
            })  # fmt: skip
    found = plain({"engine": "vllm", "rows": rows, "causes": [], "machine": machine.describe(run.device)})
    profile = read_json(run.export / PROFILE)
    write_json(run.export / PROFILE, profile | {"served": [found]})
    report = {"name": settings.name, "draft": chosen, "served": found, "settings": asdict(settings)}
    write_json(run.folder / "report.json", report)
    title = "Served by vLLM; speedup over the same engine without a draft"
    run.console.print(console_table(title, COLUMNS, found["rows"]))
