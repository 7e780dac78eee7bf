"""Every request parameter and what becomes of it. `worker.convert` obeys these tables, docs/parameters.md shows them.

A request parameter is honoured, accepted only at values that change nothing, or somebody else's business. Whatever is
in no table is refused, so that nothing a client asks for is dropped in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Neutral(NamedTuple):
    """A parameter that is not served."""

    accepted: tuple[Any, ...]
    """Values beside null that change nothing."""
    way_out: str
    """What the refusal tells the client."""


@dataclass(frozen=True, slots=True)
class Group:
    """One object of a request, as Dynamo's frontend sends it."""

    name: str
    honoured: Mapping[str, str]
    """What each parameter does here."""
    neutral: Mapping[str, Neutral]
    elsewhere: Mapping[str, str]
    """Parameters that the worker need not look at, and who does."""
    closed: bool = True
    """True if any other key is refused."""

    @property
    def known(self) -> frozenset[str]:
        """Every key that is not refused unread."""
        return frozenset({*self.honoured, *self.neutral, *self.elsewhere})


MAX_LOGPROBS = 20
"""Likeliest tokens that may be asked for beside each token, as in OpenAI's chat API."""
MAX_SALT_LETTERS = 1024
"""Letters of a cache_salt: it travels with every KV event of its request."""
PENALTY_BOUND = 2.0
"""Presence and frequency penalties lie between minus this and this, as in OpenAI's API."""

SAMPLING = Group(
    "sampling_options",
    honoured={
        "temperature": "0 and up; 0 is greedy. Default: generation_config.json, else 1",
        "top_p": "above 0, at most 1",
        "top_k": "-1 or 0 is off",
        "min_p": "0 to 1, relative to the likeliest token",
        "seed": "any whole number, modulo 2^64; one seed gives one text whatever else runs",
        "repetition_penalty": "above 0; over prompt and output, as in vLLM. Default: generation_config.json, else 1",
        "presence_penalty": f"-{PENALTY_BOUND:g} to {PENALTY_BOUND:g}; over the output",
        "frequency_penalty": f"-{PENALTY_BOUND:g} to {PENALTY_BOUND:g}; over the output",
    },
    neutral={
        "n": Neutral((1,), "one choice per request is generated: send the request several times"),
        "best_of": Neutral((1,), "one choice per request is generated: send the request several times"),
        "use_beam_search": Neutral((False,), "beam search is not served: leave it out"),
        "length_penalty": Neutral((1,), "it belongs to beam search, which is not served: leave it out"),
        "logit_bias": Neutral(({}, []), "logit bias is not served: leave it out"),
        "allowed_token_ids": Neutral((), "restricting the vocabulary is not served: leave it out"),
        "bad_words_token_ids": Neutral(([],), "banning words is not served: leave it out"),
        "logprob_token_ids": Neutral(([],), "log probabilities of chosen tokens are not served: send logprobs"),
        "skip_reading_prefix_cache": Neutral((False,), "the prefix cache is always read: send your own cache_salt"),
        "guided_decoding": Neutral(
            ({},),
            "constrained output (response_format, guided_json, guided_regex, guided_choice, guided_grammar, or a "
            "tool_choice that requires a call) is not served: leave it out",
        ),
    },
    elsewhere={
        "include_stop_str_in_output": "the frontend finds stop strings, and cuts the text before or behind them",
        "detokenize": "the frontend turns tokens into text",
    },
)

STOP = Group(
    "stop_conditions",
    honoured={
        "max_tokens": "1 and up; more than the servable length leaves room for is cut to that, and so is none at all",
        "min_tokens": "before so many output tokens none that ends the text is sampled; at most max_tokens",
        "stop_token_ids": "tokens that end the text, beside the model's own; the text is without them",
        "stop_token_ids_visible": "tokens that end the text; the frontend shows them",
        "stop_token_ids_hidden": "tokens that end the text; the frontend does not show them",
        "ignore_eos": "true: only stop tokens that the request itself names end the text",
    },
    neutral={"max_thinking_tokens": Neutral((), "a thinking budget is not served: leave it out")},
    elsewhere={"stop": "the frontend finds stop strings, and cancels the request here"},
)

OUTPUT = Group(
    "output_options",
    honoured={
        "logprobs": f"0 to {MAX_LOGPROBS}: of each output token and of so many of the likeliest in its place",
        "prompt_logprobs": f"0 to {MAX_LOGPROBS}: the same for the prompt's tokens; all are computed, none is cached",
    },
    neutral={},
    elsewhere={
        "no_stop_trim": "the frontend cuts the text; a token that ended it is always sent there",
        "skip_special_tokens": "the frontend turns tokens into text",
        "return_tokens_as_token_ids": "the frontend writes log probabilities",
        "formatted_prompt": "the prompt's text, for the frontend's own use",
    },
)

ROUTING = Group(
    "routing",
    honoured={
        "priority": "higher goes first; classes from -16 to 16",
        "cache_salt": f"requests share cached prefixes only under the same salt; at most {MAX_SALT_LETTERS} letters",
        "expected_output_tokens": "a guess: a request enters when so many tokens of room are free, and others leave it "
        "that room as long as they can. It never ends, lengthens or refuses a request",
    },
    neutral={
        "lora_name": Neutral(("",), "adapters are not served: name the base model"),
        "dp_rank": Neutral((0,), "this worker has the one rank 0: route to another worker"),
    },
    elsewhere={
        "backend_instance_id": "the router has followed it",
        "allowed_worker_ids": "the router has followed it",
        "routing_constraints": "the router has followed them",
        "priority_jump": "the place in the router's queue",
        "strict_priority": "the place in the router's queue",
        "prefill_worker_id": "of a prefill worker; a request that has used one is refused",
        "prefill_dp_rank": "of a prefill worker; a request that has used one is refused",
        "decode_worker_id": "the router has followed it",
    },
)

REQUEST = Group(
    "request",
    honoured={
        "token_ids": "the prompt: a list of token ids, or little-endian int32 bytes",
        "eos_token_ids": "the model's end-of-sequence tokens; empty with ignore_eos",
    },
    neutral={
        "multi_modal_data": Neutral(({},), "this model takes text only: leave images, audio and video out"),
        "mm_processor_kwargs": Neutral(({},), "this model takes text only: leave images, audio and video out"),
        "prompt_embeds": Neutral(("",), "prompts are taken as tokens only: send text"),
        "encoder_result": Neutral((), "this worker has no encoder: send text"),
        "prefill_result": Neutral((), "this worker computes its prompts itself: route to it without a prefill worker"),
        "bootstrap_info": Neutral((), "this worker computes its prompts itself: route to it without a prefill worker"),
        "logits_processors": Neutral(([], {}), "logits processors are not served: leave it out"),
    },
    elsewhere={},
    closed=False,  # other keys are the frontend's own, and each version of it may add some
)

GROUPS = (SAMPLING, STOP, OUTPUT, ROUTING, REQUEST)
