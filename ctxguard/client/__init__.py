"""SEND: one call on its way through the guard, and the edges to the clients that carry it.

In: a request as a client makes it. Out: the provider's answer, or an error that names the numbers.
`flow` is the whole journey without I/O; `overflow` recognises refusals; `served` asks the server;
`openai` wraps the official clients.
"""
