"""COUNT: from messages, tools and template options to the number of tokens that the serving model sees.

In go OpenAI chat messages (dicts), tool schemas and what the request tells the chat template; out comes a
number, and whether it is exact. The manager asks before and after each compaction, strategies cut texts with
`truncate`, the client makes a counter with `counter_for`.

- base: what every counter offers
- normalize, llama_cpp: messages as vLLM hands them to the template, and what llama.cpp does differently
- chat_template: exact, the served model's own template and tokenizer (jinja_template, segments, model_folder)
- tiktoken: OpenAI's hosted models, by their published formulas (openai_tools)
- approximate: a stated estimate for all others (estimate)
- media: images, audio and files, by stated upper estimates
- truncate: head and tail of a text within so many tokens
- resolve: the best counter for a model
"""

from ctxguard.tokens.approximate import ApproximateCounter, ApproximateCountWarning
from ctxguard.tokens.base import GivesTokenIds, Message, TokenCounter, Tool
from ctxguard.tokens.chat_template import ChatTemplateCounter, Dialect
from ctxguard.tokens.media import has_media
from ctxguard.tokens.normalize import normalize_messages, normalize_tools
from ctxguard.tokens.request import request_template_kwargs
from ctxguard.tokens.resolve import counter_for
from ctxguard.tokens.segments import SegmentCounter
from ctxguard.tokens.tiktoken import TiktokenCounter
from ctxguard.tokens.truncate import truncate_text

__all__ = [
    "ApproximateCountWarning",
    "ApproximateCounter",
    "ChatTemplateCounter",
    "Dialect",
    "GivesTokenIds",
    "Message",
    "SegmentCounter",
    "TiktokenCounter",
    "TokenCounter",
    "Tool",
    "counter_for",
    "has_media",
    "normalize_messages",
    "normalize_tools",
    "request_template_kwargs",
    "truncate_text",
]
