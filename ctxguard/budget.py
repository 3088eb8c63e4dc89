"""How many tokens a request may use: the window, the prompt's share of it, the response's share.

A budget says nothing about any message. The manager asks it for the prompt limit of a request and
for the marks at which compaction starts and stops.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ctxguard._verl_config import read_verl_lengths
from ctxguard.errors import BudgetError

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_RESPONSE_RESERVE = 4096
"""Tokens kept free for the response when nobody says how long it may be (at most a quarter of the window)."""

Level = Literal["call", "trajectory"]
"""What a trainer makes one row of: a call, or the calls of a rollout that go on from each other."""

MIN_WINDOW = 2
"""One token of prompt and one of response: servers refuse a prompt that fills the window."""


class ContextBudget(BaseModel):
    """The token budget of a request. Immutable; refuses unknown fields and contradictions.

    Raises:
        BudgetError: a value that is wrong or contradicts another; the message names the value, the
            limit and the remedy, and ``error.field``, ``error.value``, ``error.limit`` carry them.

    Example:
        >>> budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
        >>> budget.prompt_limit()
        12288
        >>> budget.prompt_limit(output_tokens=16384)
        4096
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    window: int
    """Tokens that prompt and response may have together: the served model's context length."""

    max_prompt_tokens: int | None = None
    """Upper limit of the prompt, below what the window allows; None for no other limit. At level
    ``"trajectory"``: upper limit of the first prompt of each row."""

    max_response_tokens: int | None = None
    """Tokens kept free for the response of a request without an output limit of its own; None keeps a
    quarter of the window free, 4096 at most. At level ``"trajectory"``: the most tokens that a row has
    behind its first prompt, answers and observations together."""

    level: Level = "call"
    """What the trainer makes one row of. ``"call"``: each call. ``"trajectory"``: the calls of a rollout
    whose prompts go on from the call before; both limits are then the row's, both must be given, every
    request needs an output limit, and calls must be made inside a rollout's scope."""

    high_mark: float = 0.97
    """Share of the prompt limit above which compaction starts."""

    low_mark: float = 0.6
    """Share of the prompt limit down to which compaction goes, so that it need not run on every call."""

    source: str = "explicit"
    """Where the window was found, for reports: ``"explicit"``, ``"verl"``, ``"vllm /v1/models"``, …"""

    if not TYPE_CHECKING:  # type checkers see the fields as keyword arguments, as for any pydantic model

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _budget_error(error) from None

        # Without this mark pydantic would run our __init__ inside validation, and wrap our error again.
        __init__.__pydantic_base_init__ = True

        @classmethod
        def model_validate(cls, obj: Any, **options: Any) -> ContextBudget:
            try:
                return super().model_validate(obj, **options)
            except ValidationError as error:
                raise _budget_error(error) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; unlike pydantic's own, the result is checked."""
        return type(self)(**{**self.model_dump(), **(update or {})})

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        window, prompt, response = self.window, self.max_prompt_tokens, self.max_response_tokens
        if window < MIN_WINDOW:
            raise _contradiction(
                "window",
                window,
                MIN_WINDOW,
                f"must be at least {MIN_WINDOW} tokens (one of prompt, one of response): give the context "
                "length of the served model, e.g. window=20480",
            )
        if prompt is not None and prompt < 1:
            raise _contradiction(
                "max_prompt_tokens",
                prompt,
                1,
                "must be at least 1 token: give a positive number, or None for no limit but the window's",
            )
        if response is not None and response < 1:
            raise _contradiction(
                "max_response_tokens",
                response,
                1,
                "must be at least 1 token: give a positive number, or None for the default reserve",
            )
        self._refuse_contradictory_marks()
        if self.level == "trajectory":
            self._refuse_half_a_row()
            return self
        if prompt is not None and prompt > window:
            raise _contradiction(
                "max_prompt_tokens",
                prompt,
                window,
                f"is {prompt - window} more than the window of {window}: lower max_prompt_tokens to at most "
                f"{window}, or raise window if the server allows it",
            )
        if response is not None and response >= window:
            raise _contradiction(
                "max_response_tokens",
                response,
                window - 1,
                f"leaves no room for a prompt in the window of {window}: lower max_response_tokens to less "
                f"than {window}, or raise window if the server allows it",
            )
        if prompt is not None and response is not None and prompt + response > window:
            over = prompt + response - window
            raise _contradiction(
                "max_prompt_tokens",
                prompt,
                window - response,
                f"and max_response_tokens={response} make {prompt + response}, {over} more than the window "
                f"of {window}: lower max_prompt_tokens to {window - response} or max_response_tokens by "
                f"{over}, or raise window if the server allows it",
            )
        return self

    def _refuse_contradictory_marks(self) -> None:
        if not 0 < self.high_mark <= 1:
            raise _contradiction(
                "high_mark",
                self.high_mark,
                1,
                "must be a share of the prompt limit, more than 0 and at most 1: e.g. high_mark=0.97",
            )
        if not 0 < self.low_mark < self.high_mark:
            raise _contradiction(
                "low_mark",
                self.low_mark,
                self.high_mark,
                f"must be more than 0 and less than high_mark={self.high_mark}, so that a compaction makes "
                "room for more than one call: e.g. low_mark=0.6",
            )

    def _refuse_half_a_row(self) -> None:
        """At level "trajectory" both limits are the row's; what they leave of the window does not matter."""
        for field, value in (
            ("max_prompt_tokens", self.max_prompt_tokens),
            ("max_response_tokens", self.max_response_tokens),
        ):
            if value is None:
                raise BudgetError(
                    f'level="trajectory" needs {field}: give what the trainer pads its rows to '
                    "(trajectory_max_prompt_length and trajectory_max_response_length of Agent Lightning's "
                    "trace_aggregator)",
                    field=field,
                    value=None,
                )

    @property
    def response_reserve(self) -> int:
        """Tokens kept free for the response when the request has no output limit of its own.

        ``max_response_tokens``, or a quarter of the window, 4096 at most and 1 at least. At level
        ``"trajectory"`` the answers of a row share ``max_response_tokens``, so it is a quarter of that.
        """
        response = self.max_response_tokens
        if response is not None and self.level == "call":
            return response
        share = self.window if response is None else min(self.window, response)
        return max(1, min(DEFAULT_RESPONSE_RESERVE, share // 4))

    def reserve_for(self, output_tokens: int | None) -> int:
        """Tokens kept free for the response of a request with this output limit.

        An output limit below 1 sets no size (llama.cpp takes -1 for "no limit"), so it counts as none.
        """
        return self.response_reserve if output_tokens is None or output_tokens < 1 else output_tokens

    def prompt_limit(self, output_tokens: int | None = None) -> int:
        """The most tokens that the prompt of a request may have.

        Args:
            output_tokens: the request's own output limit (``max_tokens``), None if it has none.

        Returns:
            The smaller of ``max_prompt_tokens`` and what the response leaves of the window. 0 or less
            means that the output limit alone leaves no room for a prompt. At level ``"trajectory"`` this is
            the limit of a prompt that starts a row.
        """
        room = self.window - self.reserve_for(output_tokens)
        return room if self.max_prompt_tokens is None else min(self.max_prompt_tokens, room)

    def joining_limit(self, first_prompt_tokens: int, output_tokens: int) -> int:
        """The most tokens that a prompt may have which joins a row (level ``"trajectory"``).

        Args:
            first_prompt_tokens: tokens of the row's first prompt.
            output_tokens: the request's output limit.

        Returns:
            What the row and the window leave, with room for the answer.
        """
        row = self.window
        if self.max_response_tokens is not None:
            row = min(row, first_prompt_tokens + self.max_response_tokens)
        return row - output_tokens

    def with_window(self, window: int, *, source: str = "learnt") -> ContextBudget:
        """The same budget in another window, e.g. one that the server told or an error revealed.

        In a larger window nothing else changes. In a smaller one the response keeps its room as far
        as that leaves the prompt its own, or half of the window if that is less; then the prompt
        limit gives way. So the result is valid for every window of 2 tokens or more.

        Raises:
            BudgetError: ``window`` is less than 2 or not an int.
        """
        ContextBudget(window=window)  # refuses what is no window
        if self.level == "trajectory":
            return self.model_copy(update={"window": window, "source": source})
        prompt, response = self.max_prompt_tokens, self.max_response_tokens
        if response is not None:
            prompt_room = self.window - response if prompt is None else prompt
            response = min(response, max(window // 2, window - prompt_room))
        if prompt is not None:
            prompt = min(prompt, window - (response or 0))
        return self.model_copy(
            update={
                "window": window,
                "max_prompt_tokens": prompt,
                "max_response_tokens": response,
                "source": source,
            }
        )

    @classmethod
    def from_verl(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], *, window: int | None = None
    ) -> ContextBudget:
        """The budget that a verl configuration implies.

        The prompt limit is ``data.max_prompt_length``, the response limit ``data.max_response_length``
        (or ``rollout.prompt_length`` and ``rollout.response_length``), the window
        ``rollout.max_model_len`` where it is set, else their sum: what verl's vLLM rollout serves up
        to 0.6, and the longest row that any verl trains on. ``rollout`` may stand at the top or under
        ``actor_rollout_ref``, or be the whole of ``config``. Limits of ``multi_turn`` count turns and
        characters, and ``data.truncation`` cuts only the data set's own prompts; neither bounds a
        request.

        Of Agent Lightning's part ``agentlightning.trace_aggregator`` is read. With its level
        ``"trajectory"`` so is the budget's, and the limits are ``trajectory_max_prompt_length`` and
        ``trajectory_max_response_length``; ``trajectory_max_total_length`` bounds the window. Without a
        level there it is ``"call"``: 0.3 and 1.0 have different defaults, so pass the composed
        configuration.

        Args:
            config: a mapping, an OmegaConf object, or the path of a (Hydra) YAML file. Of a file, only
                what stands in it is read, not what its ``defaults`` name.
            window: the served window, if it is not what the configuration says.

        Raises:
            BudgetError: a key is missing, has no whole number, cannot be resolved (interpolations need
                omegaconf), or contradicts another; the message names the keys.

        Example:
            >>> config = {"data": {"max_prompt_length": 12288, "max_response_length": 8192}}
            >>> ContextBudget.from_verl(config).window
            20480
        """
        found = read_verl_lengths(config)
        prompt, response, served, row = found.prompt, found.response, found.window, found.row
        source = "verl"
        if window is not None:
            source = "explicit"
        elif served is not None:
            window = served.tokens
        else:
            window = prompt.tokens + response.tokens
        if row is not None:
            return cls(
                window=window if row.total is None else min(window, row.total.tokens),
                max_prompt_tokens=row.prompt.tokens,
                max_response_tokens=row.response.tokens,
                level="trajectory",
                source=source,
            )
        total = prompt.tokens + response.tokens
        if total > window:
            over = total - window
            where = served.key if source == "verl" and served is not None else "the window passed here,"
            raise BudgetError(
                f"{prompt.key} {prompt.tokens} + {response.key} {response.tokens} = {total}, {over} more "
                f"than {where} {window}: lower one of the two by {over}, or serve a window of {total}",
                field=prompt.key,
                value=prompt.tokens,
                limit=window - response.tokens,
            )
        return cls(
            window=window,
            max_prompt_tokens=prompt.tokens,
            max_response_tokens=response.tokens,
            source=source,
        )


def _contradiction(field: str, value: float, limit: float, problem: str) -> BudgetError:
    return BudgetError(f"{field}={value} {problem}", field=field, value=value, limit=limit)


def _budget_error(error: ValidationError) -> BudgetError:
    """Pydantic's error as ours: the contradiction that we raised, or its own complaints in our words."""
    complaints = []
    for detail in error.errors(include_url=False):
        raised = detail.get("ctx", {}).get("error")
        if isinstance(raised, BudgetError):
            return raised
        complaints.append((str(detail["loc"][0]) if detail["loc"] else "budget", detail))
    field, first = complaints[0]
    message = "; ".join(_complaint(name, detail["type"], detail["input"]) for name, detail in complaints)
    return BudgetError(message, field=field, value=first["input"], limit=None)


def _complaint(field: str, kind: str, value: object) -> str:
    fields = list(ContextBudget.model_fields)
    if kind == "missing":
        return f"{field} is missing: give the context length of the served model, e.g. {field}=20480"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(field, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields)}"
        return f"a budget has no field {field} (value {value!r}): {hint}"
    if kind == "literal_error":
        return f"{field}={value!r} must be 'call' or 'trajectory'"
    wanted = {
        "window": "a whole number of tokens (an int)",
        "max_prompt_tokens": "a whole number of tokens (an int) or None",
        "max_response_tokens": "a whole number of tokens (an int) or None",
        "high_mark": "a share such as 0.97 (a float)",
        "low_mark": "a share such as 0.6 (a float)",
        "source": "a text",
    }.get(field, "a mapping of the budget's fields")
    return f"{field}={value!r} must be {wanted}, not {type(value).__name__}"
