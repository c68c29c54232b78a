"""Continues prompts by vLLM's offline ``generate``; run by the Python of vLLM's environment, on its own.

The arguments are those of ``vllm serve``. Standard input is a JSON object with ``sampling`` (fields of
``SamplingParams``), ``batch`` (prompts given to the engine together) and ``prompts``, a list of [number, token ids,
largest number of new tokens, seed]. For each prompt a line with `MARK` and the JSON of [number, token ids] is printed
as soon as its batch is finished.
"""

import json
import sys

MARK = "RESPONSE "


def main() -> None:
    """Reads the prompts, starts the engine, writes the responses."""
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request = json.load(sys.stdin)
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    engine = LLM(**vars(parser.parse_args()))
    for start in range(0, len(request["prompts"]), request["batch"]):
        numbers, ids, budgets, seeds = zip(*request["prompts"][start : start + request["batch"]])
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in ids],
            [
                SamplingParams(max_tokens=budget, seed=seed, detokenize=False, **request["sampling"])
                for budget, seed in zip(budgets, seeds)
            ],
            use_tqdm=False,
        )
        for number, output in zip(numbers, outputs):
            print(MARK + json.dumps([number, list(output.outputs[0].token_ids)]), flush=True)


if __name__ == "__main__":
    main()
