"""The main job, end to end: agents whose histories outgrow a real server's window, without and with ctxguard.

    make demo

or, with a Python of your own: ``pip install -e ".[demo]"`` and ``python -m examples.demo``.

What is real: the llama.cpp server (on loopback, 20480 tokens for each rollout), its counts and refusals, the
Qwen3 vocabulary and chat template, the tools, and what they find in Python's own standard library. What is
not: the model. It is tiny and has random weights, so each agent sends a real request at every step, throws
the answer's text away, and takes its next step from a script.

Read it in this order:

    tools.py    list_files, read_file, search over real source files
    tasks.py    what each rollout is asked, and the script that stands in for the model's choices
    forms.py    how calls and results are written into the history: natively, or as text
    agent.py    the agent loop: an ordinary one, it knows nothing of ctxguard
    rollouts.py the loop run unguarded and guarded, and what is noted of each rollout
    verdict.py  what must hold at the end
    screen.py   progress, tables, last lines
"""
