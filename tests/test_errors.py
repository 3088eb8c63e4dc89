"""Errors carry facts, and survive the way between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from ctxguard import errors
from ctxguard.errors import ConfigurationError, ContextOverflowError, CtxguardError

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CtxguardError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twin_of", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_keeps_its_message_and_facts(kind, twin_of):
    twin = twin_of(kind("what happened", limit=7, extra=[1, 2]))
    assert type(twin) is kind
    assert (str(twin), twin.message, twin.limit, twin.extra) == ("what happened", "what happened", 7, [1, 2])


def test_facts_that_nobody_gave_have_a_default():
    error = ContextOverflowError("x")
    assert (error.prompt_tokens, error.limit, error.attempts, error.largest_tools) == (None, None, 0, [])


def test_configuration_errors_are_value_errors_and_overflows_are_not():
    assert issubclass(ConfigurationError, ValueError)
    assert not issubclass(ContextOverflowError, ValueError)
