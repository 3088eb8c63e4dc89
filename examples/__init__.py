"""Examples that run: each script is a recipe, and `demo` is the main job end to end.

`wrap_a_client` guards a client in one line, `guarded_rollout_example` ends each rollout in one outcome,
`verl_budget` takes the budget from a training configuration, `custom_strategy` adds a way of making a
history smaller. They talk to any OpenAI-compatible server and are told of it by the environment:

    OPENAI_BASE_URL, OPENAI_API_KEY    as the OpenAI client reads them
    MODEL                              the served model's name
    TOKENIZER                          the model's folder, for exact counts; OpenAI's own models need none

``python -m examples.demo`` needs nothing: it brings a server of its own.
"""
