"""The table of docs/parameters.md; `python -m worker.parameter_table docs/parameters.md` renews it.

What the worker does comes from `worker.parameters`; what clients send, from `OPENAI`, as seen with ai-dynamo 1.6.1.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from worker.parameters import GROUPS, MAX_LOGPROBS, PENALTY_BOUND, Group

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

HONOURED, REFUSED, FRONTEND, DROPPED = "honoured", "refused", "the frontend's", "dropped by the frontend"

OPENAI: dict[str, tuple[str, str]] = {
    "model": (FRONTEND, "finds the workers that serve it"),
    "messages": (
        FRONTEND,
        "chat template and tokenizer; image and audio parts get its 400, or one from here if it lets them pass",
    ),
    "prompt": (FRONTEND, "tokenizer; a list of token ids passes as it is"),
    "stream, stream_options": (FRONTEND, "answers in pieces, usage in the last"),
    "max_tokens, max_completion_tokens": (HONOURED, "cut to the room that the servable length leaves"),
    "temperature, top_p, top_k, min_p, seed": (HONOURED, "missing ones: generation_config.json"),
    "presence_penalty, frequency_penalty": (HONOURED, f"-{PENALTY_BOUND:g} to {PENALTY_BOUND:g}"),
    "repetition_penalty": (HONOURED, "the frontend lets pass what is above 0 and at most 2"),
    "min_tokens": (HONOURED, "the frontend looks for stop strings only behind them"),
    "ignore_eos": (HONOURED, "with it, 1.6.1 drops the client's own stop, stop_token_ids too: only the length ends"),
    "stop_token_ids": (HONOURED, "at most 32 pass the frontend; none beyond the vocabulary can ever be sampled"),
    "stop, include_stop_str_in_output": (
        FRONTEND,
        "at most 32 strings, or token ids, which arrive as stop_token_ids; finds them in the text and ends the request",
    ),
    "logprobs, top_logprobs": (
        HONOURED,
        f"chats: true, and 0 to {MAX_LOGPROBS}, which says nothing without logprobs; completions: logprobs from 0 to 5",
    ),
    "prompt_logprobs": (
        HONOURED,
        "plain chats carry them as `prompt_logprobs`; streamed chats and completions only with `nvext.extra_fields: "
        '["prompt_logprobs"]`; of a plain completion with several prompts 1.6.1 keeps those of one',
    ),
    "echo": (FRONTEND, "1.6.1 does not repeat the prompt; with logprobs it asks for prompt_logprobs, see there"),
    "n, best_of": ("1 only", "send the request several times"),
    "response_format, guided_json, guided_regex, guided_choice, guided_grammar": (
        REFUSED,
        "as guided_decoding; text and an empty guided_choice are neutral",
    ),
    "guided_decoding_backend, guided_whitespace_pattern": (DROPPED, "unless one of the above is sent"),
    "thinking_token_budget, nvext.max_thinking_tokens": (REFUSED, "as max_thinking_tokens"),
    "mm_processor_kwargs, prompt_embeds": (REFUSED, "the second by the frontend"),
    "tools, tool_choice, parallel_tool_calls": (
        FRONTEND,
        "parses calls; a tool_choice that requires one arrives as guided_decoding and is refused",
    ),
    "reasoning_effort, chat_template_args, chat_template_kwargs": (FRONTEND, "goes into the chat template"),
    "add_generation_prompt, continue_final_message": (FRONTEND, "how the chat template ends"),
    "service_tier, thinking": (FRONTEND, "no influence on the text"),
    "allowed_token_ids, bad_words_token_ids, logprob_token_ids": (REFUSED, "by name"),
    "skip_special_tokens, return_tokens_as_token_ids, detokenize": (FRONTEND, "turns tokens into text"),
    "logit_bias, suffix": (DROPPED, "1.6.1 accepts them and sends no worker anything of them; do not rely on them"),
    "prediction, audio, modalities, web_search_options": (DROPPED, "as above"),
    "user, metadata, store": (FRONTEND, "no influence on the text"),
    "functions, function_call": (FRONTEND, "501: send tools"),
    "use_beam_search, length_penalty, bad_words, priority, lora_name": (FRONTEND, "400: not known to it"),
    "cache_salt, nvext.cache_salt": (HONOURED, "see routing; the second goes before the first, and empty is none"),
    "nvext.agent_hints.priority": (HONOURED, "see routing"),
    "nvext.agent_hints.osl": (HONOURED, "as expected_output_tokens"),
    "nvext.agent_hints.strict_priority, nvext.agent_hints.speculative_prefill": (FRONTEND, "the router's"),
    "nvext.greed_sampling": (
        DROPPED,
        "and with it 1.6.1 drops temperature, so that the model's default draws: send temperature 0",
    ),
    "nvext.token_data": (FRONTEND, "these ids become the prompt"),
    "nvext.extra_fields, nvext.annotations": (FRONTEND, "what the answer carries beside the text, worker ids included"),
    "nvext.backend_instance_id, nvext.decode_worker_id, nvext.prefill_worker_id, nvext.prefill_dp_rank, nvext.router": (
        FRONTEND,
        "routing; a worker that is not there is a 400 without a reason",
    ),
    "nvext.dp_rank": (FRONTEND, "the router chooses the rank itself"),
    "nvext.routing_constraints": (FRONTEND, "routing; 500 if no worker meets them"),
    "nvext.use_raw_prompt, nvext.request_timestamp_ms, nvext.metadata_upload": (
        FRONTEND,
        "nothing of them is used here",
    ),
}
"""What a client may put into a request: who acts on it, and how."""


def _rows(group: Group) -> Iterator[tuple[str, str, str]]:
    for name, meaning in group.honoured.items():
        yield name, HONOURED, meaning
    for name, rule in group.neutral.items():
        accepted = ", ".join(f"`{value!r}`" for value in rule.accepted)
        yield name, REFUSED if not accepted else f"{REFUSED}, except null and {accepted}", rule.way_out
    for name, whose in group.elsewhere.items():
        yield name, "passed over", whose


def _table(head: tuple[str, str, str], rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|"
    for names, *cells in rows:
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        yield f"| {shown} | {' | '.join(cells)} |"


def render() -> str:
    """The tables, as Markdown."""
    lines = ["## What a client sends", ""]
    lines += _table(("parameter", "what becomes of it", "how"), ((name, *row) for name, row in OPENAI.items()))
    lines += ["", "## What the worker gets", ""]
    lines += ["A key in none of these tables is refused by its name, except of the request itself.", ""]
    for group in GROUPS:
        lines += [f"### `{group.name}`", ""]
        lines += _table(("parameter", "what the worker does", "how"), _rows(group))
        lines.append("")
    return "\n".join(lines)


def renewed(page: str) -> str:
    """`page` with its table replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{render()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
