"""What servers say when a request does not fit, as a table: one row per wording.

To teach ctxguard a new wording, add a row to `WORDINGS` (anywhere: the order carries no meaning) and
a line with the real text to ``tests/client/wordings/<family>.jsonl``. A row is matched against the
*normalised* text (see `normalise`): lower case, straight quotes, backslashes gone, every run of white
space one blank. In a pattern ``<limit>``, ``<prompt>``, ``<completion>``, ``<total>`` and ``<excess>``
stand for a number; the rest is a regular expression. Two habits keep the table fast and safe: begin
with a literal word, and bound every repeat (``.{0,80}?``, never ``.*``).

When several rows match one text (a gateway quoting two errors), the row that names the most numbers
wins, then the one whose kind is the more specific; so a vague row never hides a precise one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["WORDINGS", "Kind", "Wording", "fingerprint", "normalise"]


class Kind(str, Enum):
    """What a server's answer says about length."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt alone fills or exceeds the window: only a smaller prompt helps."""
    PROMPT_PLUS_OUTPUT_TOO_LONG = "prompt_plus_output_too_long"
    """The prompt fits, prompt + output limit does not: a smaller output limit helps, too."""
    OUTPUT_BUDGET_INVALID = "output_budget_invalid"
    """The output limit itself is refused (over the model's output cap, zero): the prompt is not at fault."""
    REQUEST_TOO_LARGE = "request_too_large"
    """Bytes or characters, not tokens."""
    RATE_LIMIT_TOKENS = "rate_limit_tokens"
    """A token quota per minute or day: waiting helps, compaction does not."""
    FINISH_REASON_LENGTH = "finish_reason_length"
    """The answer was cut, by the output limit or by the end of the window."""
    SILENT_TRUNCATION = "silent_truncation"
    """The server accepted the request and lost part of it, or ran past its window, without saying so."""
    NOT_OVERFLOW = "not_overflow"

    def __str__(self) -> str:
        return self.value


_ROLES = ("limit", "prompt", "completion", "total", "excess")
# At most 12 digits: int() refuses very long ones, and no window needs more.
_NUMBER = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,12})(?![0-9])"
_PLACEHOLDER = re.compile("<(" + "|".join(_ROLES) + ")>")
_UNICODE_ESCAPE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_STRAIGHT_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\\": None})
_WORD = re.compile(r"[^\W\d_]+")
_ANY_NUMBER = re.compile(r"(?<![\w.])" + _NUMBER + r"(?![\w])")


@dataclass(frozen=True)
class Wording:
    """One way of saying something about length.

    Attributes:
        name: ``family.what``; it becomes `Classification.evidence`.
        kind: what the words mean; between the two overflow kinds the numbers decide, not this.
        pattern: regular expression over the normalised text, with number placeholders.
        needle: literal text that must be there, looked for first because that is cheap; needed only for
            a pattern that does not begin with a literal.
        digest: instead of a pattern, the `fingerprint` of the text's words (see `suggest_row`).
        roles: with a digest, the role of each number of the text in order ("" for none).
        prompt_is_lower_bound: the prompt number is not a measurement; only the limit can be learnt.
        bound_at_border: the prompt number is a lower bound exactly where it is limit + 1 or
            limit - completion + 1 (vLLM stops tokenising there).
        prompt_from_total: the text names the prompt only as total minus completion.
        limit_offset: added to the limit (a range written with an exclusive end).
        limit_is_window: the limit is the window, although the kind is about the output limit.
        disguised: "got N": an output limit that the server may have computed itself.
        structural: the order or pairing of messages is refused; after a compaction, our own mistake.
        weak: holds only while our own exact count does not contradict it.
        off_http: a trainer's own exception; never believed of a server's answer.
    """

    name: str
    kind: Kind
    pattern: str = ""
    needle: str = ""
    digest: str = ""
    roles: tuple[str, ...] = ()
    prompt_is_lower_bound: bool = False
    bound_at_border: bool = False
    prompt_from_total: bool = False
    limit_offset: int = 0
    limit_is_window: bool = False
    disguised: bool = False
    structural: bool = False
    weak: bool = False
    off_http: bool = False
    _regex: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if bool(self.pattern) == bool(self.digest):
            raise ValueError(f"wording {self.name!r} needs either a pattern or a digest")
        if self.pattern:
            regex = _PLACEHOLDER.sub(lambda m: f"(?P<{m[1]}>{_NUMBER})", self.pattern)
            object.__setattr__(self, "_regex", re.compile(regex))
            object.__setattr__(self, "needle", self.needle or _leading_literal(self.pattern))

    def find(self, text: str) -> dict[str, int] | None:
        """The numbers that this wording names in ``text`` (normalised), by role; None if it is not there."""
        if self._regex is None or self.needle not in text:
            return None
        match = self._regex.search(text)
        if match is None:
            return None
        return {role: _to_int(number) for role, number in match.groupdict().items() if number is not None}

    def find_by_digest(self, digest: str, numbers: list[int]) -> dict[str, int] | None:
        """Like `find`, for a text that is given as its `fingerprint`."""
        if not self.digest or digest != self.digest or len(numbers) != len(self.roles):
            return None
        return {role: number for role, number in zip(self.roles, numbers, strict=True) if role in _ROLES}


def _leading_literal(pattern: str) -> str:
    """The literal text that every match of ``pattern`` begins with."""
    outside = re.sub(r"\\.|\[[^]]*\]", "", pattern)
    while (inner := re.sub(r"\([^()]*\)", "", outside)) != outside:
        outside = inner
    if "|" in outside:
        return ""
    literal = re.match(r"[a-z0-9 ,:'_=-]*", pattern)
    assert literal is not None  # it matches the empty string, too
    end = literal.end()
    return pattern[: end - 1] if pattern[end : end + 1] in ("?", "*", "{") else pattern[:end]


def _to_int(number: str) -> int:
    return int(number.replace(",", ""))


def normalise(text: str) -> str:
    """``text`` as the patterns expect it; call it on bounded text only.

    Escapes go because the same sentence arrives plain, as JSON in a JSON string, and as the ``repr``
    of a dict inside an exception's text.
    """
    if "\\u" in text:
        text = _UNICODE_ESCAPE.sub(lambda m: chr(int(m[1], 16)), text)
    text = text.replace("\\n", " ").replace("\\t", " ").translate(_STRAIGHT_QUOTES)
    return " ".join(text.lower().split())


def fingerprint(text: str) -> tuple[str, list[int]]:
    """A digest of the words of ``text`` (normalised) and its whole numbers, in order.

    Words with a digit in them (request ids, model names with a version) do not count, so that the same
    sentence about other numbers has the same digest.
    """
    words = [part for part in text.split() if not any(c.isdigit() for c in part)]
    digest = hashlib.sha256(" ".join(_WORD.findall(" ".join(words))).encode("utf-8", "replace")).hexdigest()
    return digest[:16], [_to_int(number) for number in _ANY_NUMBER.findall(text)]


_PROMPT = Kind.PROMPT_TOO_LONG
_SUM = Kind.PROMPT_PLUS_OUTPUT_TOO_LONG
_OUTPUT = Kind.OUTPUT_BUDGET_INVALID
_BYTES = Kind.REQUEST_TOO_LARGE
_RATE = Kind.RATE_LIMIT_TOKENS
_CUT = Kind.FINISH_REASON_LENGTH
_SILENT = Kind.SILENT_TRUNCATION
_OTHER = Kind.NOT_OVERFLOW

_MAX_CONTEXT = r"maximum context length is <limit> tokens[.,] however,? "


def _structural(name: str, pattern: str) -> Wording:
    return Wording(f"structure.{name}", _OTHER, pattern, structural=True)


_OVERFLOWS = (
    # The wording of OpenAI's first API, shared by vLLM <= 0.9, llama-cpp-python, DeepSeek, Mistral, ...
    Wording(
        "openai.requested_in_messages",
        _SUM,
        _MAX_CONTEXT + r"you requested <total> tokens \(<prompt> in (?:the|your) (?:messages|prompt)[,;] "
        r"<completion> (?:in|for) the completion\)",
    ),
    Wording(
        "openai.requested_with_functions",
        _SUM,
        _MAX_CONTEXT + r"you requested <total> tokens \([0-9]{1,12} in the messages, [0-9]{1,12} in the "
        r"functions,? (?:and )?<completion> in the completion\)",
        prompt_from_total=True,
    ),
    Wording(
        "openai.messages_resulted_in",
        _PROMPT,
        # "(202767 in the messages, 101 in the functions)" may follow: functions are prompt, not output
        _MAX_CONTEXT + r"your messages resulted in <total> tokens",
        prompt_from_total=True,
    ),
    Wording(
        "openai.configured_limit",
        _PROMPT,
        r"input tokens exceed the configured limit of <limit>(?: "
        r"tokens)?(?:\. your messages resulted in <prompt>)?",
    ),
    Wording("openai.exceeds_window_of", _PROMPT, r"exceeds the context window of <limit> tokens"),
    Wording("openai.code", _PROMPT, r"context_length_exceeded"),
    Wording("vllm.has_input_tokens", _PROMPT, _MAX_CONTEXT + r"your request has <prompt> input tokens"),
    Wording(
        "vllm.max_tokens_too_large",
        _SUM,
        r"is too large: <completion>\. this model's maximum context "
        r"length is <limit> tokens and your request "
        r"has <prompt> input tokens",
    ),
    Wording(
        "vllm.you_passed",
        _SUM,
        r"you passed <prompt> input tokens and requested <completion> output tokens\. however, the model's "
        r"context length is only <limit> tokens",
        bound_at_border=True,
    ),
    Wording(
        "vllm.contains_at_least",
        _SUM,
        _MAX_CONTEXT + r"you requested <completion> output tokens and your prompt contains at least <prompt> "
        r"input tokens, for a total of at least <total> tokens",
        prompt_is_lower_bound=True,
    ),
    Wording(
        "vllm.contains",
        _SUM,
        _MAX_CONTEXT + r"you requested <completion> output tokens and your prompt contains <prompt> input "
        r"tokens, for a total of <total> tokens",
        bound_at_border=True,
    ),
    Wording(
        "vllm.exceeds_without_output",
        _PROMPT,
        _MAX_CONTEXT + r"your prompt contains at least <prompt> input tokens",
        prompt_is_lower_bound=True,
    ),
    Wording(
        "vllm.exceeds_without_output_measured",
        _PROMPT,
        _MAX_CONTEXT + r"your prompt contains <prompt> input tokens",
        bound_at_border=True,
    ),
    Wording(
        "vllm.characters",
        _SUM,
        # the number after "contains" counts characters: no prompt size can be read from it
        _MAX_CONTEXT
        + r"you requested <completion> output tokens and your prompt contains [0-9,]{1,15} characters",
    ),
    Wording("vllm.characters_only", _PROMPT, _MAX_CONTEXT + r"your prompt contains [0-9,]{1,15} characters"),
    Wording(
        "vllm.decoder_prompt",
        _PROMPT,
        r"prompt \(length <prompt>\) is longer than the maximum model length of <limit>",
    ),
    Wording(
        "vllm.total_length",
        _PROMPT,
        r"prompt \(total length <prompt>\) is too long to fit into the model \(context length <limit>\)",
    ),
    Wording(
        "vllm.scheduler",
        _SILENT,
        # only a log line: the request ends with an empty answer and no error
        r"input prompt \(<prompt> tokens\) is too long and exceeds limit of <limit>",
    ),
    Wording(
        "sglang.longer_than",
        _PROMPT,
        r"input \(<prompt> tokens\) is longer than the model's context length \(<limit> tokens\)",
    ),
    Wording(
        "sglang.requested_total",
        _SUM,
        r"exceeds the model's maximum context length of <limit> "
        r"tokens\. you requested a total of <total> tokens: "
        r"<prompt> tokens from the input messages and <completion> tokens for the completion",
    ),
    Wording(
        "sglang.input_length",
        _PROMPT,
        r"input length \(?<prompt>(?: tokens)?\)? exceeds the maximum "
        r"allowed (?:input )?length (?:of )?\(?<limit>",
    ),
    Wording("sglang.longer_than_vague", _PROMPT, r"is longer than the model's context length"),
    Wording("sglang.input_length_vague", _PROMPT, r"exceeds the maximum allowed input length"),
    Wording(
        "tgi.inputs_plus_new",
        _SUM,
        r"inputs` tokens \+ `max_new_tokens` must be <= <limit>\. "
        r"given: <prompt> `inputs` tokens and <completion> "
        r"`max_new_tokens`",
    ),
    Wording(
        "tgi.inputs",
        _PROMPT,
        r"inputs` must have less than <limit> tokens\. given: <prompt>",
        limit_offset=-1,
    ),
    Wording(
        "llamacpp.request_tokens",
        _PROMPT,
        r"request \(<prompt> tokens\) exceeds the available context size \(<limit> tokens\)",
    ),
    Wording("llamacpp.fields", _PROMPT, r"n_prompt_tokens\W{1,4}<prompt>\W{1,4}n_ctx\W{1,4}<limit>"),
    Wording("llamacpp.vague", _PROMPT, r"exceeds the available context size"),
    Wording("llamacpp.exceeded_while_running", _PROMPT, r"context size has been exceeded"),
    Wording("llamacpp.type", _PROMPT, r"exceed_context_size_error"),
    Wording(
        "llamacpp_python.requested",
        _PROMPT,
        r"requested tokens \(<prompt>\) exceed context window of <limit>",
    ),
    Wording(
        "lmstudio.keep_first",
        _PROMPT,
        r"trying to keep the first <prompt> tokens when .{0,120}?loaded "
        r"with context length of only <limit> tokens",
    ),
    Wording("lmstudio.n_keep", _PROMPT, r"n_keep: <prompt> ?>= ?n_ctx: <limit>"),
    Wording(
        "lmstudio.keep_vague", _PROMPT, r"keep from the initial prompt is greater than the context length"
    ),
    Wording("ollama.excess", _PROMPT, r"prompt too long; exceeded max context length by <excess> tokens"),
    Wording("ollama.cloud", _PROMPT, r"prompt is too long: <prompt>, model maximum context length: <limit>"),
    Wording("ollama.input_length", _PROMPT, r"input length exceeds the context length"),
    Wording("anthropic.prompt", _PROMPT, r"prompt is too long: <prompt> tokens > <limit> maximum"),
    Wording(
        "anthropic.prompt_and_max_tokens",
        _SUM,
        r"input length and `?max_tokens`? exceed context limit: <prompt> \+ <completion> > <limit>",
    ),
    Wording("anthropic.request_size", _PROMPT, r"request size exceeds model context window"),
    Wording("anthropic.prompt_vague", _PROMPT, r"prompt is too long"),
    # As a stop reason this is an answer; as an error's text an SDK made an exception of it.
    Wording("anthropic.stop_reason_raised", _PROMPT, r"model_context_window_exceeded"),
    Wording(
        "gemini.token_count",
        _PROMPT,
        r"input token count(?: \(<prompt>\))? exceeds the maximum number of tokens allowed \(<limit>\)",
    ),
    Wording(
        "gemini.supports_up_to",
        _PROMPT,
        r"input token count is <prompt> but model only supports up to <limit>",
    ),
    Wording("bedrock.mantle", _PROMPT, r"prompt tokens \(<prompt>\) exceed model maximum \(<limit>\)"),
    Wording("bedrock.input_too_long", _PROMPT, r"input is too long for requested model"),
    Wording(
        "bedrock.too_many_input_tokens",
        _PROMPT,
        r"too many input tokens\. max input tokens: <limit>, request input token count: <prompt>",
    ),
    Wording(
        "mistral.too_large",
        _PROMPT,
        r"prompt contains <prompt> tokens.{0,80}?too large for model with <limit> maximum context length",
    ),
    Wording("mistral.vague", _PROMPT, r"too large for model with"),
    Wording("cohere.sum", _PROMPT, r"\(prompt and prediction\) cannot exceed <limit> - received <total>"),
    Wording(
        "cohere.size_limit",
        _PROMPT,
        r"size limit exceeded by <excess> tokens(?:.{0,120}?limit for this model is <limit> tokens)?",
    ),
    Wording("dashscope.input_range", _PROMPT, r"range of input length should be \[1, ?<limit>\]"),
    Wording("zhipu.max_tokens_allowed", _PROMPT, r"tokens in request more than max tokens allowed"),
    Wording("zhipu.max_length", _PROMPT, r"prompt exceeds max length"),
    Wording("ark.max_message_tokens", _PROMPT, r"exceed max message tokens"),
    Wording(
        "moonshot.model_token_limit", _PROMPT, r"exceeded model token limit: <limit> \(requested: <prompt>\)"
    ),
    Wording("moonshot.token_length", _PROMPT, r"input token length too long"),
    Wording("moonshot.model_token_limit_vague", _PROMPT, r"exceeded model token limit"),
    # MiniMax's number 2013 means "invalid params" and proves nothing.
    Wording("minimax.window", _PROMPT, r"context window exceeds limit"),
    Wording("minimax.base_resp", _PROMPT, r"1039\W{1,4}status_msg\W{1,4}token limit"),
    Wording(
        "xai.prompt_length",
        _PROMPT,
        r"maximum prompt length is <limit> but the request contains <prompt> tokens",
    ),
    Wording(
        "openrouter.about_with_output",
        _SUM,
        _MAX_CONTEXT + r"you requested about <total> tokens \(.{0,80}?\b<completion> in the output\)",
        prompt_from_total=True,
    ),
    Wording(
        "openrouter.about",
        _PROMPT,
        _MAX_CONTEXT + r"you requested about <total> tokens \((?![^)]{0,80}in the output)",
        prompt_from_total=True,
    ),
    Wording("copilot.token_count", _PROMPT, r"prompt token count of <prompt> exceeds the limit of <limit>"),
    Wording(
        "together.input_length",
        _PROMPT,
        r"input length \(<prompt>\) exceeds model's maximum context length \(<limit>\)",
    ),
    Wording(
        "watsonx.sequence",
        _PROMPT,
        r"longer than the specified maximum sequence length for this model \(<prompt> > <limit>\)",
    ),
    Wording(
        "tensorrt.prompt_length",
        _PROMPT,
        r"prompt length \(<prompt>\) exceeds maximum input length \(<limit>\)",
    ),
    Wording(
        "tensorrt.max_num_tokens",
        _PROMPT,
        r"sum of prompt length \(<prompt>(?:\.0)?\), query length \([0-9.]{1,12}\) should not exceed "
        r"max_num_tokens \(<limit>\)",
    ),
    Wording(
        "tensorrt.default_max_tokens",
        _PROMPT,
        r"default_max_tokens` \(<completion>\) = max_seq_len \(<limit>\) - `splited_prompt_len` \(<prompt>\)",
    ),
    Wording(
        "ds.configured_context",
        _PROMPT,
        r"prompt has <prompt> tokens, but the configured context size is <limit> tokens",
    ),
    Wording("lightllm.sum", _SUM, r"input prompt token len <prompt> \+ <completion> > <limit>"),
    Wording("lightllm.sum_vague", _SUM, r"input prompt token len \S{1,20} \+ <completion> > <limit>"),
    Wording(
        "verl.tensor_sizes",
        _PROMPT,
        # an over-long prompt that no filter caught, seen by the trainer far from its cause
        r"sizes of tensors must match except in dimension 0\. expected "
        r"size <limit> but got size <prompt> for tensor",
        off_http=True,
    ),
    Wording("cerebras.no_body", _PROMPT, r"^(?:error: )?4(?:00|13) status code \(no body\)", weak=True),
    Wording(
        "relay.chinese",
        _PROMPT,
        "上下文(?:过长|超出限制|长度超出|超过|长度超过)|超出最大上下文|超过最大上下文|压缩上下文后重试",
    ),
    Wording("generic.max_context", _PROMPT, r"maximum context length (?:is|of) <limit>"),
    Wording("generic.context_only", _PROMPT, r"context length is only <limit>"),
    Wording("generic.litellm_class", _PROMPT, r"contextwindowexceedederror"),
    Wording("generic.reduce_messages", _PROMPT, r"reduce the length of the messages"),
    Wording(
        "generic.exceeds_context",
        _PROMPT,
        r"(?:exceed|exceeds|exceeded|exceeding|surpassing) (?:the |"
        r"this |its |llm |model |model's |maximum |max |"
        r"available ){0,4}context[ _-]?(?:length|window|size|limit)",
        needle="context",
    ),
    Wording(
        "generic.context_exceeded",
        _PROMPT,
        r"context[ _-]?(?:length|window|size|limit) (?:has been |was |is )?(?:exceed|overflow)",
    ),
)

_OUTPUT_LIMITS = (
    Wording("vllm.at_least_one", _OUTPUT, r"max_tokens must be at least 1, got <completion>", disguised=True),
    Wording("vllm.at_least_one_vague", _OUTPUT, r"tokens must be at least 1(?!, got)"),
    Wording(
        "vllm.over_model_len",
        _OUTPUT,
        r"tokens=<completion> cannot be greater than max_model_len=<limit>",
        limit_is_window=True,
    ),
    Wording(
        "openai.completion_cap",
        _OUTPUT,
        r"tokens is too large: <completion>\. this model supports at most <limit> completion tokens",
    ),
    Wording(
        "openai.below_minimum",
        _OUTPUT,
        r"tokens': integer below minimum value\. expected a value >= [0-9]{1,6}, but got <completion>",
        disguised=True,
    ),
    Wording(
        "azure.below_minimum",
        _OUTPUT,
        r"<completion> is less than the minimum of 1 - 'max_",
        needle="minimum of 1 - ",
        disguised=True,
    ),
    Wording("tgi.strictly_positive", _OUTPUT, r"max_new_tokens` must be strictly positive"),
    Wording(
        "anthropic.output_cap",
        _OUTPUT,
        r"max_tokens: <completion> > <limit>, which is the maximum allowed number of output tokens",
    ),
    Wording(
        "ollama.output_cap",
        _OUTPUT,
        r"max_tokens \(<completion>\) exceeds model's maximum output tokens \(<limit>\)",
    ),
    Wording(
        "groq.output_cap", _OUTPUT, r"max_(?:completion_)?tokens`? must be less than or equal to `?<limit>"
    ),
    Wording("dashscope.output_range", _OUTPUT, r"range of max_tokens should be \[1, ?<limit>\]"),
    Wording("deepseek.output_range", _OUTPUT, r"valid range of max_tokens is \[1, ?<limit>\]"),
    Wording("zhipu.output_cap", _OUTPUT, r"max_tokens should be less or equal to <limit>"),
    Wording(
        "bedrock.output_cap", _OUTPUT, r"maximum tokens you requested exceeds the model limit of <limit>"
    ),
    Wording(
        "vertex.output_range",
        _OUTPUT,
        r"maxoutputtokens value of <completion> but the supported range "
        r"is from 1 \(inclusive\) to <limit> \(exclusive\)",
        limit_offset=-1,
    ),
    Wording(
        "cohere.output_cap",
        _OUTPUT,
        r"max tokens must be less than or equal to <limit>, the maximum "
        r"output for this model - received <completion>",
    ),
    Wording("fastapi.output_field", _OUTPUT, r"loc: body, max_(?:completion_|output_)?tokens\b"),
)

_BYTE_LIMITS = (
    Wording(
        "openai.string_too_long",
        _BYTES,
        r"string too long\. expected a string with maximum length "
        r"<limit>, but got a string with length <total>",
    ),
    Wording("openai.string_code", _BYTES, r"string_above_max_length"),
    Wording(
        "jackson.string_length",
        _BYTES,
        r"string value length \(<total>\) exceeds the maximum allowed \(<limit>",
    ),
    Wording("bedrock.max_length", _BYTES, r"expected maxlength: <limit>, actual: <total>"),
    Wording("bedrock.text_bytes", _BYTES, r"too many total text bytes(?:: <total> > <limit>)?"),
    Wording("gemini.payload", _BYTES, r"request payload size exceeds the limit: <limit> bytes"),
    Wording("gemini.grpc", _BYTES, r"sent message larger than max \(<total> vs\. <limit>\)"),
    Wording("anthropic.request_size_bytes", _BYTES, r"request exceeds the maximum size"),
    Wording("anthropic.type", _BYTES, r"request_too_large"),
    Wording("anthropic.image_bytes", _BYTES, r"image exceeds .{1,20} maximum: <total> bytes > <limit> bytes"),
    Wording(
        "http.entity",
        _BYTES,
        r"(?:request entity|payload|request body|content|body) (?:is )?too large(?! for model)",
    ),
)

_TOKEN_QUOTAS = (
    Wording(
        "openai.tpm",
        _RATE,
        r"tokens per \w{3,6} \(\w{2,4}\): limit <limit>, (?:used [0-9,]{1,15}, )?requested <total>",
    ),
    Wording("anthropic.tpm", _RATE, r"rate limit of <limit> (?:input |output )?tokens per"),
    Wording("moonshot.tpd", _RATE, r"tp[md] rate limit, current: <total>, limit: <limit>"),
    Wording("gemini.quota", _RATE, r"quota exceeded for metric.{0,120}?token_count(?:, limit: <limit>)?"),
    Wording("azure.token_rate", _RATE, r"token rate limit"),
    Wording("bedrock.throttled", _RATE, r"too many tokens,? (?:please wait|per day)"),
    Wording("generic.tokens_per", _RATE, r"tokens per (?:min|minute|hour|day)\b"),
)

_CUT_ANSWERS = (
    Wording(
        "openai.length_finish",
        _CUT,
        r"length limit was reached(?:.{0,40}?completion_tokens=<completion>, prompt_tokens=<prompt>, "
        r"total_tokens=<total>)?",
    ),
    Wording("openai.could_not_finish", _CUT, r"could not finish the message because max_tokens"),
)

_STRUCTURE = (
    _structural("calls_unanswered", r"must be followed by tool messages"),
    _structural("calls_unanswered_ids", r"tool_use`? ids were found without `?tool_result"),
    _structural("calls_unanswered_output", r"no tool output found for function call"),
    _structural("result_without_call", r"must be a response to a prece{1,2}ding message with 'tool_calls'"),
    _structural("result_without_call_id", r"unexpected `?tool_use_id`? found in `?tool_result"),
    _structural("result_without_call_output", r"no tool call found for function call output"),
    _structural("result_without_call_minimax", r"tool result's tool id"),
    _structural("result_beside_text", r"conversation blocks and tool result blocks cannot"),
    _structural("gemini_function_turn", r"function call turn comes immediately after"),
    _structural("gemini_function_parts", r"number of function response parts"),
    _structural("no_user", r"no user query found in messages"),
    _structural("system_not_first", r"system message must be at the beginning"),
    _structural("alternate", r"roles must alternate"),
    _structural("last_role", r"expected last role"),
    _structural("unexpected_role", r"unexpected role '\w{1,12}' after role"),
    _structural("empty", r"at least one message is required"),
    _structural("empty_list", r"invalid 'messages': empty array"),
    _structural("empty_too_short", r"\[\] is too short - 'messages'"),
    _structural("empty_template", r"template to an empty conversation"),
    _structural("empty_text", r"text content blocks must (?:be non-empty|contain non-whitespace)"),
    _structural("thinking_changed", r"thinking`? blocks .{0,60}?cannot be modified"),
    _structural("thinking_missing", r"expected `?thinking`? or `?redacted_thinking`?, but found"),
)

# Recognised as something else: our own numbers do not turn these into an overflow.
_OTHERS = (
    Wording(
        "other.content_filter",
        _OTHER,
        r"content_filter|content management policy|responsibleaipolicyviolation",
    ),
    Wording("other.moderation", _OTHER, r"(?:flagged|blocked) (?:by|as|for|because)"),
    Wording("other.authentication", _OTHER, r"api[ _-]?key|authentication|unauthorized|permission|forbidden"),
    Wording("other.billing", _OTHER, r"insufficient_quota|credit|billing|current quota|can only afford"),
    Wording("other.account_prompt_cap", _OTHER, r"prompt tokens limit exceeded"),
    Wording("other.model", _OTHER, r"model_not_found|model .{1,80}? (?:does not exist|not found)"),
    Wording(
        "other.parameter",
        _OTHER,
        r"(?:unsupported|unknown|unrecognized|missing|invalid) "
        r"(?:required )?(?:parameter|value|request argument|"
        r"field|type|schema)|unexpected fields|extra inputs are not permitted|"
        r"field required|is not supported (?:with|by|for) this",
    ),
    Wording("other.json", _OTHER, r"parse the json|json decode|invalid json|not valid json"),
    Wording(
        "other.image",
        _OTHER,
        r"(?:image|media|base64|audio) .{0,60}?(?:dimension|invalid|could not|unsupported)",
    ),
    Wording("other.rate", _OTHER, r"rate limit|rate_limit|too many requests|per minute|throttl"),
    Wording("other.overloaded", _OTHER, r"overloaded|bad gateway|service unavailable|timed out|timeout"),
    Wording("other.reasoning", _OTHER, r"reasoning is mandatory"),
)

WORDINGS: tuple[Wording, ...] = (
    *_OVERFLOWS,
    *_OUTPUT_LIMITS,
    *_BYTE_LIMITS,
    *_TOKEN_QUOTAS,
    *_CUT_ANSWERS,
    *_STRUCTURE,
    *_OTHERS,
)
"""The table."""
